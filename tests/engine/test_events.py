"""What befalls the scheduler: it must have its effect, and an event that is ignored is seen."""

import pytest

from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit

from .conftest import Runner

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

EVENTS = Case(
    name="events",
    model="llama-tiny",
    num_steps=2,
    chunks=(4, 5, 7),
    requests=(
        Request(id="a", prompt=tuple(range(40, 53)), max_new_tokens=16),
        Request(id="b", prompt=(3, 1, 4, 1, 5), max_new_tokens=16),
        Request(id="c", prompt=(2, 7, 1, 8, 2, 8), max_new_tokens=4, arrive=34),
    ),
    events=(
        Event(at=5, kind="retract"),
        Event(at=7, kind="pause"),
        Event(at=9, kind="resume"),
        Event(at=10, kind="abort", request="b"),
    ),
    exercises=("retraction", "retraction_in_decode", "abort_in_decode", "chunked_prefill", "shared_chunk"),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True)),
)
FLUSH = Case(
    name="flush",
    model="llama-tiny",
    num_steps=1,
    requests=(
        Request(id="a", prompt=(3, 1, 4, 1, 5), max_new_tokens=2),
        Request(id="b", prompt=(3, 1, 4, 1, 5, 9), max_new_tokens=2, arrive=12),
    ),
    events=(Event(at=9, kind="flush"),),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True)),
)

IGNORED = {
    "every abort": (EVENTS, "abort_request", "if (chunked_req := self.chunked_req) is not None:", "return\n{}", "abort of b"),
    "aborts of what runs": (
        EVENTS,
        "abort_request",
        "for req in self.collect_inflight_reqs():",
        "for req in []:",
        "abort of b",
    ),
    "the pause": (
        EVENTS,
        "pause_generation",
        'if recv_req.mode == "in_place":',
        "{}\n    self._engine_paused = False",
        "pause until iteration 9",
    ),
    "the retraction": (
        EVENTS,
        "pause_generation",
        "if self.enable_overlap and self.last_batch:",
        "return\n{}",
        "retraction of a",
    ),
    "the flush": (FLUSH, "flush_cache", "self.tree_cache.reset()", "return True\n{}", "slots in the cache after the flush"),
}


@pytest.mark.parametrize("case", [EVENTS, FLUSH], ids=lambda case: case.name)
def test_events_on_the_unmodified_release_are_equal(run: Runner, case: Case) -> None:
    _, verdict = run(case)
    assert verdict.status == "equal", verdict
    assert verdict.checked["schedule.events"] >= len(case.events) - 1


@pytest.mark.parametrize("ignored", sorted(IGNORED))
def test_a_scheduler_that_ignores_an_event_diverges(run: Runner, ignored: str) -> None:
    case, function, match, replacement, index = IGNORED[ignored]
    edit = Edit(target=f"{SCHEDULER}.{function}", match=match, replacement=replacement.format(match))
    _, verdict = run(case, edit)
    assert (verdict.status, verdict.rule) == ("diverged", "schedule.events"), verdict
    assert verdict.first is not None
    assert verdict.first.index == index
