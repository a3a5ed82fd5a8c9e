"""Live: with llguidance the mask after a token is that after another one, which was taken back.

llguidance remembers the last mask by the number of parsed lexemes and the state of its lexer, and forgets it with no rollback.
A node of a tree, or the token that takes a refused draft's place, may have both in common with a node that was masked before.
"""

from ..entry import Entry, Grammar, Request, SGLangSettings, small_case, small_patch

ENTRY = Entry(
    id="guidance-rollback",
    title="Mask no token of llguidance by what it remembers of one that was taken back",
    rule="grammar.mask",
    buggy="0.5.16 -",
    trigger="grammar-backend llguidance: a draft that the grammar allows, and in its place a token behind which the same "
    "terminals may come",
    remedy=small_patch(
        "guidance-masks-of-copies",
        "sglang.srt.constrained.llguidance_backend.GuidanceGrammar.fill_vocab_mask",
        "fill_next_token_bitmask(self.ll_matcher, vocab_mask, idx)",
        "matcher = self.ll_matcher.deep_copy()\nfill_next_token_bitmask(matcher, vocab_mask, idx)\n"
        "if matcher.is_error():\n    raise ValueError(matcher.get_error())",
    ),
    case=small_case(
        Request(id="a", prompt=(90,), max_new_tokens=4, grammar=Grammar(kind="ebnf", rules=("(a|b)A|c(a|b)b|d(a|b)a",))),
        sglang=SGLangSettings(grammar_backend="llguidance"),
    ),
)
