"""Live and declared: rows of a multi-layer draft that were fed a draft keep it when verify rejects it (boundary KV).

Layer k looks k tokens ahead, so at each extend its last k rows consume drafts. The next extend begins behind them, whatever
verify said. SGLang repairs this for hybrid models (SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX, since 0.5.16) and for no others. It costs
acceptance and never output. The judge declares it (DESIGN 3.7) and follows `last_fed`; this entry shows that `committed` is
another thing. The same in vLLM: issue #14649 (open).
"""

from ..entry import Entry, Loses, Request, small_case

ENTRY = Entry(
    id="boundary-kv",
    title="Rewrite the rows of layers 1.. that were fed a draft which verify rejected",
    rule="draft.kv",
    buggy="0.5.9 -",
    trigger="multi-layer EAGLE without a hybrid model, num_steps >= 2, a draft that is rejected",
    loses=Loses("always", layers=True, num_steps=2),
    view="committed",
    case=small_case(
        Request(id="a", prompt=(9,), max_new_tokens=4), model="llama-mtp", num_steps=2, exercises=("look_ahead_rejected",)
    ),
)
