"""Where a number stands, in words: the stages of a trace, and the place of a divergence."""

from .verdict import Divergence

STAGES = {
    "target.extend": "target prefill",
    "draft.extend": "draft extend (prefill)",
    "prefill": "after draft extend (prefill)",
    "draft.decode": "draft decode",
    "draft": "when draft() returned",
    "target.verify": "target verify",
    "verify": "when verify returned",
    "draft.extend_decode": "draft extend (decode)",
    "extend": "after draft extend (decode)",
    "finished": "end of the request",
    "cached": "prefix cache at the end",
    "copy": "a copy between device and host",
    "looked_up": "when a request was looked up in the prefix cache",
    "kernel": "inside a kernel",
    "batch": "before a batch ran",
    "iteration": "before a scheduler iteration",
    "steps": "before verify, of the whole batch",
    "read": "when a batch's result was looked at before a retraction",
    "fed": "when a batch's result was processed",
    "session": "when a request of a session was handed in",
    "flushed": "after the cache was flushed",
    "pool": "between two batches",
    "plain": "in plain decode",
}


def place_of(found: Divergence, num_steps: int, layers: bool) -> str:
    """Rank, request, round and stage, with its step and layer."""
    where = f"request {found.request}, round {found.round}, " if found.request else ""
    stage = STAGES[found.stage]
    first = 0 if found.stage == "draft.decode" else 1  # a plain language model's step 0; of draft() the whole has none
    if found.stage in ("draft.decode", "draft") and first <= found.step < num_steps:  # nor has what comes after the last step
        stage = f"draft decode step {found.step}" + (", when draft() returned" if found.stage == "draft" else "")
    if layers and found.rule.startswith("draft.") and found.stage != "draft":
        stage += f", layer {found.layer}"
    return (f"rank {found.rank}, " if found.rank is not None else "") + where + stage
