"""Races of a plan: cases that run again with pauses, and missing waits, planted in memory, that such a run must find.

Streams of 0.5.23's overlap scheduler: *schedule* prepares batches, *forward* runs them, *copy* takes results to the host. Waits
between them, of what cases reach: forward for schedule before a batch; schedule for forward behind a batch, before it changes
what the batch reads; schedule for the lengths that verify has published; copy for forward; and the process for the copy.
"""

from msgspec.structs import replace

from eagletwin.cases.sample_cases import draw_cases
from eagletwin.cases.strategies import VALUES, Focus, cases, focus_of
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Mode

from .job import Job, MustShow
from .plan import GRAPHS

CASES = 200  # in which each missing wait must show
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_LENGTHS = "sglang.srt.managers.overlap_utils.FutureMap.resolve_seq_lens_cpu"
_RESULT = "sglang.srt.managers.scheduler_components.batch_result_processor"
_MODES = (Mode(device="cuda", graphs=GRAPHS, overlap=True), Mode(device="cuda", overlap=True))
_TIMES = 2  # with pauses, of each case
_FEW = 20  # cases of what must not show

_NOT_PUBLISHED = Edit(target=_LENGTHS, match="self.publish_ready.wait()", replacement="pass")
_NO_FENCE = Edit(
    target=f"{_SCHEDULER}._apply_war_barrier",
    match="self.schedule_stream.wait_stream(self.forward_stream)",
    replacement="pass",
)

# What is not waited for, by what does not wait.
WAITS = (
    Patch(name="schedule-for-lengths", edits=(_NOT_PUBLISHED, _NO_FENCE)),
    Patch(
        name="forward-for-schedule",
        edits=(
            Edit(
                target=f"{_SCHEDULER}.run_batch",
                match=f"self.forward_stream.wait_stream(self.schedule_stream)\n{' ' * 16}if gpu_only_lens:",
                replacement="if gpu_only_lens:",
            ),
        ),
    ),
    Patch(
        name="copy-for-forward",
        edits=(
            Edit(
                target=f"{_SCHEDULER}._copy_result_to_cpu",
                match="self.copy_stream.wait_stream(self.forward_stream)",
                replacement="pass",
            ),
        ),
    ),
    Patch(
        name="process-for-copy",
        edits=(
            Edit(
                target=f"{_RESULT}.SchedulerBatchResultProcessor.process_batch_result_decode",
                match="result.copy_done.synchronize()",
                replacement="pass",
            ),
        ),
    ),
)
# With the attention backends that cases run on, schedule waits for all of a batch: that this wait is missing changes nothing.
HIDDEN = (Patch(name="schedule-for-lengths-behind-the-fence", edits=(_NOT_PUBLISHED,)),)
_FENCE = "the fence behind each batch (_apply_war_barrier) is the whole batch's, and orders as much"


def races(groups: int, each: int, seed: int) -> list[Job]:
    """Groups of cases that share a configuration, with overlap, each second one in graphs: every case again with pauses."""
    jobs = []
    for group in range(groups):
        number = seed * 7919 + 200_000 + group
        mode = _MODES[group % 2]
        focus = focus_of(number, radix_cache=group % 4 != 3)  # the rows that it keeps are compared, too
        found = _cases(focus, each, number)
        word = "graphs" if mode.graphs else "eager"
        jobs.append(Job(name=f"races-{word}-{group:03}", mode=mode, cases=found, races=_TIMES))
    return jobs


def missing_waits(seed: int) -> list[Job]:
    """Each in as many cases as it takes, at most CASES; in graphs a tree, without graphs a chain."""
    jobs = []
    for mode, topk in zip(_MODES, (3, 1), strict=True):
        number = seed * 7919 + 300_000 + topk
        found = _cases(focus_of(number, model="llama-tiny", num_steps=3, topk=topk, radix_cache=True), CASES, number)
        word = "graphs" if mode.graphs else "eager"
        for patch in WAITS + HIDDEN:
            expected = MustShow(hidden=_FENCE if patch in HIDDEN else "")
            job = Job(name=f"races/{word}/{patch.name}", mode=mode, cases=found, patches=(patch,), races=1, expected=expected)
            few = replace(job, cases=found[:_FEW]) if expected.hidden else replace(job, until_found=True)
            jobs.append(few)
    return jobs


def _cases(focus: Focus, each: int, number: int) -> tuple[Case, ...]:
    return tuple(draw_cases(cases(focus, held=tuple(VALUES)), each, number))
