"""A pool so small that the scheduler takes requests' slots away and prefills them again: legal, and judged as such."""

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings

from ..rows import spread
from .conftest import Runner

# (num_steps, page_size, radix cache, pool): SGLang's admission leaves out what speculation reserves, and so must retract.
TIGHT = [(5, 4, False, 64), (5, 4, True, 64), (16, 1, False, 128), (16, 1, True, 128)]


@pytest.mark.parametrize(("num_steps", "page_size", "radix_cache", "pool"), spread(TIGHT, lambda row: row[1]))
def test_a_retracted_request_is_equal(run: Runner, num_steps: int, page_size: int, radix_cache: bool, pool: int) -> None:
    requests = tuple(
        Request(id=f"q{n}", prompt=tuple((17 * n + 31 * i + 5 * i * n) % 96 for i in range(5 + n)), max_new_tokens=8)
        for n in range(6)
    )
    case = Case(
        name="tight",
        model="llama-tiny",
        num_steps=num_steps,
        page_size=page_size,
        requests=requests,
        exercises=("retraction",),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=radix_cache, max_total_tokens=pool)),
    )
    _, verdict = run(case)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize(
    ("page_size", "chunk", "at"),
    [(1, 64, 1), (4, 64, 1), (1, 8, 2), (1, 8, 3)],
    ids=["whole", "in pages", "in chunks", "behind"],
)
def test_a_retraction_before_the_first_verify_is_one_where_the_request_comes_back_to_a_prefix(
    run: Runner, busy_case: Case, page_size: int, chunk: int, at: int
) -> None:
    """It begins anew behind what the prefix cache has, and so at a place where no chunk of its own began."""
    request = replace(busy_case.requests[0], prompt=busy_case.requests[0].prompt[:18])
    case = replace(
        busy_case,
        requests=(request,),
        page_size=page_size,
        chunked_prefill_size=chunk,
        events=(Event(at=at, kind="retract"),),
        exercises=("retraction",),
    )
    trace, verdict = run(case)
    [ended] = [record.numbers for record in trace.header.records if record.stage == "finished"]
    assert ended["retractions"] == 1
    assert verdict.status == "equal", verdict
    assert "radix_hit" not in verdict.exercised  # its own rows, and no other request's
