"""Live: what llguidance does with a token (`--grammar-backend llguidance`).

guidance-end: With llguidance a token that ends a text which could go on does not end its request, which gets a second one.

SGLang asks whether the matcher had stopped before the token. It has where nothing can follow. Where a text is whole and could
go on, the token itself stops it, and the next one finds it stopped. An end-of-sequence token ends the request all the same,
but for `ignore_eos`.

guidance-rollback: With llguidance the mask after a token is that after another one, which was taken back.

llguidance remembers the last mask by the number of parsed lexemes and the state of its lexer, and forgets it with no rollback.
A node of a tree, or the token that takes a refused draft's place, may have both in common with a node that was masked before.

guidance-refused: With llguidance a token that the grammar refuses ends the server, and all requests with it.

SGLang gives a token where a request allows none. xgrammar refuses it and stays as it was, and the request alone is aborted.
llguidance's matcher has failed from then on, and the next mask raises. With overlap that is the mask of the round that was
launched. Without, it is that of the round behind a prefill, whose token is read after the request's end was looked for.
docs/findings/guidance-refused.

`impossible-sampler`: a request that samples where no token is allowed ends the server, and all requests with it.

A grammar whose text is whole allows an end alone, and min_new_tokens holds ends back; or a processor forbids what a grammar
allows. All logits of the row are -inf then, their softmax is nan, and torch.multinomial raises. Where all of a batch is greedy
the request is given some token, its grammar refuses it, and it alone is aborted. docs/findings/impossible-sampler.
"""

from msgspec.structs import replace

from eagletwin.harness.core.grammar import ends
from eagletwin.harness.families import RECIPES

from ..entry import EngineSettings, Entry, Grammar, Processor, Request, Sampling, SGLangSettings, small_case, small_patch

_SCALE = "logits.div_(sampling_info.temperatures)"
_SAMPLED = Sampling(top_p=0.9)
# llguidance allows one token, number 3; the processor forbids it.
FORBIDDEN = Request(id="a", prompt=(1,), max_new_tokens=1, grammar=Grammar(rules=("d",)), processor=Processor(kind="forbid"))
# xgrammar allows what ends a text, of which min_new_tokens holds all back.
_HELD_BACK = Request(
    id="a",
    prompt=(1,),
    max_new_tokens=1,
    grammar=Grammar(rules=("()",)),
    min_new_tokens=1,
    stop=tuple(ends(RECIPES["llama-tiny"].target.vocab_size)),
    sampling=_SAMPLED,
)
GUIDANCE = EngineSettings(sglang=SGLangSettings(grammar_backend="llguidance"))

IMPOSSIBLE = Entry(
    id="impossible-sampler",
    title="Give up the request alone that samples where no token is allowed",
    rule="engine.crash",
    buggy="0.5.9 -",
    trigger="--sampling-backend pytorch, top_k, top_p or min_p in a batch, and a request of it whose grammar allows only what "
    "min_new_tokens or a custom logit processor forbids",
    remedy=small_patch(
        "rows-without-a-token-are-sampled",
        "sglang.srt.layers.sampler.Sampler.forward",
        _SCALE,
        f'logits.masked_fill_(logits.amax(-1, keepdim=True) == float("-inf"), 0.0)\n{_SCALE}',
    ),
    case=small_case(replace(FORBIDDEN, sampling=_SAMPLED), engine=GUIDANCE, exercises=("impossible",)),
    also=(small_case(_HELD_BACK, name="impossible-sampler-2", exercises=("impossible",)),),
)

_GRAMMAR = "sglang.srt.constrained.llguidance_backend.GuidanceGrammar"

_GUIDANCE = (
    Entry(
        id="guidance-end",
        title="End a request of llguidance with the token that ends its text",
        rule="verify.accept",
        buggy="0.5.10 -",
        trigger="grammar-backend llguidance and ignore_eos: a text that is whole and could go on, such as one of `ab?` "
        "after `a`",
        remedy=small_patch(
            "guidance-accepting", f"{_GRAMMAR}.accept_token", "self.ll_matcher.is_stopped()", "self.ll_matcher.is_accepting()"
        ),
        recorded="output.tokens",
        case=small_case(
            Request(id="a", prompt=(50,), max_new_tokens=3, grammar=Grammar(rules=("ab?",))),
            sglang=SGLangSettings(grammar_backend="llguidance"),
        ),
    ),
    Entry(
        id="guidance-rollback",
        title="Mask no token of llguidance by what it remembers of one that was taken back",
        rule="grammar.mask",
        buggy="0.5.16 -",
        trigger="grammar-backend llguidance: a draft that the grammar allows, and in its place a token behind which the same "
        "terminals may come",
        remedy=small_patch(
            "guidance-masks-of-copies",
            f"{_GRAMMAR}.fill_vocab_mask",
            "fill_next_token_bitmask(self.ll_matcher, vocab_mask, idx)",
            "matcher = self.ll_matcher.deep_copy()\nfill_next_token_bitmask(matcher, vocab_mask, idx)\n"
            "if matcher.is_error():\n    raise ValueError(matcher.get_error())",
        ),
        case=small_case(
            Request(id="a", prompt=(90,), max_new_tokens=4, grammar=Grammar(kind="ebnf", rules=("(a|b)A|c(a|b)b|d(a|b)a",))),
            sglang=SGLangSettings(grammar_backend="llguidance"),
        ),
    ),
    Entry(
        id="guidance-refused",
        title="Leave a grammar of llguidance as it was when it refuses a token",
        rule="engine.crash",
        buggy="0.5.10 -",
        trigger="grammar-backend llguidance, and a request whose grammar allows only what min_new_tokens or a custom logit "
        "processor forbids",
        remedy=small_patch(
            "guidance-stays-when-it-refuses",
            f"{_GRAMMAR}.accept_token",
            "self.ll_matcher.consume_token(token)\n",
            "if not self.ll_matcher.try_consume_tokens([token]):\n"
            "    self._check_err()\n"
            '    raise ValueError(f"the grammar does not allow token {token}")\n',
        ),
        case=small_case(replace(FORBIDDEN, max_new_tokens=2), engine=GUIDANCE, exercises=("impossible",)),
    ),
)

ENTRIES = (*_GUIDANCE, IMPOSSIBLE)
