"""Live, found by eagletwin: a retracted request that is prefilled again in chunks, of which one ends in what it has emitted.

At the end of a chunk that is not the last, the draft must consume the next token that is known (PR #26329). SGLang looks it up
in the request's prompt alone, and behind that takes what the target gives there. A request that samples draws another token.
A greedy one with penalties gets another, too: they count what it was sent, and that is more by now. So does a greedy one with
a grammar, which says what may follow all that it was sent. The draft's row there is then that of a token which the request does
not have. A greedy request with neither gets the token that it got before, and shows nothing; but in bfloat16 rounding may
decide otherwise between two tokens that are nearly alike. It costs acceptance and never output. Read in 0.5.13 and later; shown
from 0.5.14 on, where verify samples here.
"""

from msgspec.structs import replace

from ..entry import Entry, Event, Grammar, Loses, Penalties, Request, Sampling, SGLangSettings, small_case, small_patch

_CASE = small_case(
    Request(id="a", prompt=(7,), max_new_tokens=5, sampling=Sampling(temperature=5)),
    name="retracted-chunk-tail",
    chunks=(64, 2),
    events=(Event(at=2, kind="retract"),),
    exercises=("chunked_prefill", "retraction_in_decode", "sampled_verify"),
    sglang=SGLangSettings(random_seed=1),
)
_PENALIZED = Request(id="a", prompt=(5,), max_new_tokens=5, penalties=Penalties(frequency=1))
# Its first token is an `a`. After it came back its grammar wants a `c`, at the prompt's end as well.
_CONSTRAINED = Request(id="a", prompt=(7,), max_new_tokens=2, grammar=Grammar(rules=("ac",)))

ENTRY = Entry(
    id="retracted-chunk-tail",
    title="At a chunk's tail in what a retracted request has emitted, consume the token that it emitted",
    rule="draft.input_ids",
    buggy="0.5.13 -",
    trigger="a request that samples, or has penalties or a grammar, is retracted, "
    "and a chunk of its second prefill ends behind its prompt",
    loses=Loses("batches", layers=False, needs="sampling"),
    remedy=small_patch(
        "retracted-chunk-tail",
        "sglang.srt.managers.schedule_batch._compute_chunked_req_next_prompt_token",
        "origin_ids = chunked_req.origin_input_ids",
        "origin_ids = [*chunked_req.origin_input_ids, *chunked_req.output_ids]",
    ),
    case=_CASE,
    also=(
        replace(_CASE, requests=(_PENALIZED,), exercises=()),
        replace(_CASE, requests=(_CONSTRAINED,), chunks=(64, 1), events=(Event(at=1, kind="retract"),), exercises=()),
    ),
    rounded=True,
)
