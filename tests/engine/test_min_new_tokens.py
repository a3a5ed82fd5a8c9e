"""min_new_tokens, on the real worker with the candidate fix of penalties: until then nothing ends a request."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, Event, Request
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.host import Host

from ..rows import spread
from .conftest import Runner

STOPS = tuple(range(0, 96, 2))
LEASTS = (7, 3, 0, 5)
CASE = Case(
    name="min-new-tokens",
    model="llama-tiny",
    num_steps=3,
    requests=tuple(
        Request(id=f"r{n}", prompt=(prompt,), max_new_tokens=12, arrive=2 * n, stop=STOPS, min_new_tokens=least)
        for n, (prompt, least) in enumerate(zip((84, 59, 9, 16), LEASTS, strict=True))
    ),
    events=(Event(at=4, kind="retract"),),
    exercises=("held_back", "early_stop", "retraction_in_decode", "batch_shrinks"),
)
PENALIZER = "sglang.srt.sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer"
OWN = "(req.sampling_params.stop_token_ids or set())"

REMEDY = LEDGER["penalties"].remedy
assert REMEDY is not None
_, FIX, _ = REMEDY.edits  # the others are of the overlap scheduler, and of what counts by itself


def _counting(wrong: str) -> Edit:
    """The candidate fix, which counts otherwise."""
    right = "one.len_output_tokens[row] = len(sent)"
    assert right in FIX.replacement
    return replace(FIX, replacement=FIX.replacement.replace(right, f"one.len_output_tokens[row] = {wrong}"))


# Fault -> its edits.
PLANTED: dict[str, tuple[Edit, ...]] = {
    "one token a round is counted (live)": (),
    "the prompt counts": (_counting("len(sent) + len(req.origin_input_ids)"),),
    "one token too late": (_counting("len(sent) - 1"),),
    "a request's own stop tokens are not held back": (
        FIX,
        Edit(target=f"{PENALIZER}._prepare", match=OWN, replacement="set()"),
    ),
    "another request's least length, once a batch shrinks": (
        FIX,
        Edit(
            target=f"{PENALIZER}._filter",
            match="self.min_new_tokens = self.min_new_tokens[keep_indices]",
            replacement="self.min_new_tokens = self.min_new_tokens[: len(keep_indices)]",
        ),
    ),
    "verify does not hold back": (
        FIX,
        Edit(
            target="sglang.srt.speculative.eagle_utils.eagle_sample",
            match="if sampling_info.acc_additive_penalties is not None:",
            replacement="if False:",
        ),
    ),
}


def test_the_next_case_of_a_process_has_no_tokenizer(host: Host, tmp_path: Path) -> None:
    """Which requests with min_new_tokens alone need."""
    at = "return self.finished_reason is not None"
    looks = Edit(
        target="sglang.srt.managers.schedule_batch.Req.finished",
        match=at,
        replacement=f"assert self.sampling_params.min_new_tokens or self.tokenizer is None\n{at}",
    )
    for least, before in ((2, 0), (0, 1)):
        request = Request(id="a", prompt=(84,), max_new_tokens=4, min_new_tokens=least)
        case = replace(CASE, requests=(request,), events=(), exercises=())
        folder = tmp_path / str(least)
        folder.mkdir()
        trace = host.engine(case, (Patch(name="looks", edits=(looks,)),)).run(case, folder, fresh=False)
        assert (trace.header.ending.kind, trace.header.before) == ("finished", before), trace.header.ending


def test_nothing_ends_a_request_before_it_may(run: Runner) -> None:
    trace, verdict = run(CASE, FIX)
    assert verdict.status == "equal", verdict
    lengths = [len(trace.integers(n, "tokens")) for n, record in enumerate(trace.header.records) if record.stage == "finished"]
    assert all(length >= least for length, least in zip(sorted(lengths), sorted(LEASTS), strict=True))


@pytest.mark.parametrize("fault", spread(sorted(PLANTED)))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    _, verdict = run(replace(CASE, exercises=()), *PLANTED[fault])
    assert verdict.status == "diverged", verdict
    assert verdict.rule in {"verify.accept", "output.tokens"}
