"""A pool so small that the scheduler takes requests' slots away and prefills them again: legal, and judged as such."""

import pytest

from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings

from .conftest import Runner

# (num_steps, page_size, radix cache, pool): SGLang's admission leaves out what speculation reserves, and so must retract.
TIGHT = [(5, 4, False, 64), (5, 4, True, 64), (16, 1, False, 128), (16, 1, True, 128)]


@pytest.mark.parametrize(("num_steps", "page_size", "radix_cache", "pool"), TIGHT)
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
