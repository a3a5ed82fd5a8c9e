"""Faults that only a GPU can have, planted in memory: in CUDA graphs, and missing waits between streams. Each must be found."""

from msgspec.structs import replace

from eagletwin.cases.strategies import VALUES, Focus, cases
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Attention, Dtype, Mode
from eagletwin.harness.families.dimensions.dimension import tokens

from .draw import draw_cases, focus_of
from .job import Job, MustShow
from .plan import GRAPHS, MODES, ONE_GRAPH

# Faults that only a CUDA graph can have, planted in memory: what `gpu plan --faults` adds. Each must be found.
#
# A graph reads its own buffers, which the worker must fill before each replay, and leaves its results in buffers that the
# worker may take for those of a batch that ran without it. Layers of a draft have a graph each, or with FlashAttention one for
# all of them.

_LAYERS = "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker"
_DECODE = "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.execute"
_EXTEND = "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.execute"
_RUNNER = (
    "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner"
)


def _edit(name: str, target: str, match: str, replacement: str) -> Patch:
    return Patch(name=name, edits=(Edit(target=target, match=match, replacement=replacement),))


# PR #22832's: states taken from the buffers of a graph, because there is one, though the batch was larger than the largest and
# ran without. There they were kept for the next round; the releases without the bug keep none, so here it is the states that a
# layer hands to the next. A graph's buffers have fewer rows than such a batch: the rest are the batch's own.
STATES_OF_NO_RUN = _edit(
    "states-of-a-graph-that-did-not-run",
    f"{_LAYERS}._draft_extend_for_decode",
    "forward_batch.spec_info.hidden_states = (",
    """graphs = self.cuda_graph_runner_for_draft_extend
stale = graphs.buffers.hidden_states if graphs else select_index[:0]
forward_batch.spec_info.hidden_states = (lambda own: torch.cat((stale, own[len(stale) :])) if len(stale) else own)(""",
)

# What is not filled before a replay: of draft decode and draft extend of a single head,
SINGLE_HEAD = (
    _edit(
        "positions-of-draft-decode", _DECODE, "buffers.positions[:raw_num_token],", "buffers.positions[:raw_num_token].clone(),"
    ),
    _edit("slots-of-draft-decode", _DECODE, "self.speculative_num_steps],\n", "self.speculative_num_steps].clone(),\n"),
    _edit(
        "states-of-draft-decode",
        _DECODE,
        "buffers.hidden_states[:raw_bs].copy_",
        "buffers.hidden_states[:raw_bs].clone().copy_",
    ),
    _edit("tokens-of-draft-decode", _DECODE, "buffers.topk_index[:raw_bs],", "buffers.topk_index[:raw_bs].clone(),"),
    _edit("ids-of-draft-extend", _EXTEND, "buffers.input_ids[:num_tokens],", "buffers.input_ids[:num_tokens].clone(),"),
    _edit("positions-of-draft-extend", _EXTEND, "buffers.positions[:num_tokens],", "buffers.positions[:num_tokens].clone(),"),
)
# of several layers, in graphs of a layer each and in one graph of all,
LAYERS = (
    _edit("states-of-layers", f"{_RUNNER}.prepare", "== buffers.hidden_states.shape[1]", "== -1"),
    _edit("last-rows-of-layers", f"{_RUNNER}.prepare", "buffers.select_index,", "buffers.select_index.clone(),"),
)
# and what one graph of all layers does by itself: it plans each layer's attention, and moves windows on.
ONE_GRAPH_OF_LAYERS = (
    _edit("lengths-of-layers", f"{_RUNNER}.prepare", "buffers.seq_lens,", "buffers.seq_lens.clone(),"),
    _edit("windows-not-moved-on", f"{ONE_GRAPH}._capture_one_graph", "if i < n - 1:", "if i < 0:"),
    _edit(
        "plan-of-the-capture",
        "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.init_forward_metadata_in_graph",
        "if not forward_batch.forward_mode.is_draft_extend_v2():",
        "if True:",
    ),
)


def batch_of(size: int, model: str, topk: int = 1) -> Case:
    """`size` requests that begin at once and decode together for some rounds."""
    return Case(
        name=f"batch-{size}-{model}",
        model=model,
        num_steps=3,
        topk=topk,
        num_draft_tokens=6 if topk > 1 else 0,
        requests=tuple(
            Request(id=f"r{number}", prompt=tokens(size * 64 + number, 5 + number, 96), max_new_tokens=9)
            for number in range(size)
        ),
        engine=EngineSettings(sglang=SGLangSettings(max_running_requests=16)),
    )


def faults(dtype: Dtype = "float32", attention: Attention = "triton") -> list[Job]:
    """Batches in a graph of their size, padded, and larger than the largest: as the release is, and with each fault."""
    layers = (STATES_OF_NO_RUN, *LAYERS, *(ONE_GRAPH_OF_LAYERS if attention == "fa3" else ()))
    kinds = (("graphs", "llama-tiny", 1, SINGLE_HEAD), ("graphs", "llama-tiny", 3, SINGLE_HEAD))
    kinds += tuple((mode, "llama-mtp-chain", 1, layers) for mode in ("graphs", "overlap"))
    return [
        Job(
            name=f"faults/{model}-topk{topk}-{mode}/{patches[0].name if patches else 'none'}",
            mode=replace(MODES[mode], dtype=dtype, attention=attention),
            cases=tuple(batch_of(size, model, topk) for size in (2, 3, 5)),
            patches=patches,
            times=1 if patches else 3,  # what is stale depends on what ran before
            expected=MustShow() if patches else None,
        )
        for mode, model, topk, planted in kinds
        for patches in ((), *((patch,) for patch in planted))
    ]


# Races of a plan: cases that run again with pauses, and missing waits, planted in memory, that such a run must find.
#
# Streams of 0.5.23's overlap scheduler: *schedule* prepares batches, *forward* runs them, *copy* takes results to the host.
# Waits between them, of what cases reach: forward for schedule before a batch; schedule for forward behind a batch, before it
# changes what the batch reads; schedule for the lengths that verify has published; copy for forward; and the process for the
# copy.

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
