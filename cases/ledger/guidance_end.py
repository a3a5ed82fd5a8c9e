"""Live: with llguidance a token that ends a text which could go on does not end its request, which gets a second one.

SGLang asks whether the matcher had stopped before the token. It has where nothing can follow. Where a text is whole and could
go on, the token itself stops it, and the next one finds it stopped. An end-of-sequence token ends the request all the same,
but for `ignore_eos`.
"""

from ..entry import Entry, Grammar, Request, SGLangSettings, small_case, small_patch

ENTRY = Entry(
    id="guidance-end",
    title="End a request of llguidance with the token that ends its text",
    rule="verify.accept",
    buggy="0.5.10 -",
    trigger="grammar-backend llguidance and ignore_eos: a text that is whole and could go on, such as one of `ab?` after `a`",
    remedy=small_patch(
        "guidance-accepting",
        "sglang.srt.constrained.llguidance_backend.GuidanceGrammar.accept_token",
        "self.ll_matcher.is_stopped()",
        "self.ll_matcher.is_accepting()",
    ),
    recorded="output.tokens",
    case=small_case(
        Request(id="a", prompt=(50,), max_new_tokens=3, grammar=Grammar(rules=("ab?",))),
        sglang=SGLangSettings(grammar_backend="llguidance"),
    ),
)
