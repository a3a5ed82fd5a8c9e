"""Live, found by eagletwin: a request that samples where no token is allowed ends the server, and all requests with it.

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

ENTRY = Entry(
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
