"""Live, found by eagletwin: with overlap a mixed step masks a running request by a text that lacks the step's before.

A forward with overlap begins before the result of the one before was looked at. Verify has the grammars read those tokens
before it makes its masks. A prefill does not, and needs not for requests whose prompts it reads. With mixed chunks it gives
requests that run a token as well, and their masks are those of the step before. docs/findings/mixed-grammar.
"""

from ..entry import Entry, Grammar, Needs, OnCuda, Request, SGLangSettings, small_case, small_patch
from .grammar import BY_DISTANCE

_BARRIER = 'fwd_kwargs["grammar_barrier"] = ('
_READ_BEFORE = small_patch(
    "grammars-read-before-a-mixed-step",
    "sglang.srt.managers.scheduler.Scheduler.run_batch",
    _BARRIER,
    f"""if batch.decoding_reqs and batch.forward_mode.is_extend():
    # verify() masks no rows of a prefill batch, so its
    # running requests need their grammars advanced here.
    # Decode batches keep a stale decoding_reqs.
    self._advance_pending_grammar()
{_BARRIER}""",
)

# b's text is `a` when a's prefill gives it one token more, which must be an end and is an `a` again.
ENTRY = Entry(
    id="mixed-grammar",
    title="Have grammars read the step before, before a mixed step masks the requests that run",
    rule="grammar.mask",
    buggy="0.5.19 -",
    trigger="overlap, --enable-mixed-chunk, and a request with a grammar that decodes beside another request's prefill",
    needs=Needs(overlap=True),
    remedy=_READ_BEFORE,
    # its second row shows grammar-stride, too, which is mended on both sides
    on_cuda=OnCuda(green=(_READ_BEFORE, BY_DISTANCE), red=(BY_DISTANCE,), until="0.5.23"),
    case=small_case(
        Request(id="a", prompt=(49,), max_new_tokens=1, arrive=1),
        Request(id="b", prompt=(49,), max_new_tokens=2, grammar=Grammar(rules=("a",))),
        exercises=("mixed_step",),
        sglang=SGLangSettings(mixed_chunks=True),
    ),
)
