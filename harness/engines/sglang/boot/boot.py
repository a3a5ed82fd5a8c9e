"""Import SGLang, and build the real Scheduler and EAGLE worker of a configuration. Called by zygote.py and worker.py.

What is changed on the way is listed by name in SHIMS, which every trace carries. On a machine without a GPU: host functions
that mean nothing on a CPU, and module flags that send SGLang to its own Triton kernels instead of absent C++ ones. On one with
a GPU: cuda.py.
"""

import importlib
import inspect
import os
import pkgutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.run_spec import CPU, Dtype, Mode
from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.engines.inside.own_loader import import_early
from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.dimensions import DIMENSIONS
from eagletwin.harness.families.recipe import TRACKED_EVERY, Recipe
from eagletwin.harness.families.store import checkpoints, other_checkpoints
from eagletwin.harness.families.valid import not_driven

from .. import case_requests, grammars
from ..compat import (
    adaptive,
    attention,
    compressed_attention,
    dp_attention,
    memory,
    requests,
    sparse_attention,
    state_layers,
    verify,
    workers,
)
from ..graphs import gates, install
from ..stand_ins import stubs
from ..taps import speculation
from . import cuda, new_weights, preimport, registry, single_rank

SHIMS = preimport.SHIMS
# settings that an engine without a draft lacks
_OF_DRAFTS = ("topk", "num_steps", "num_draft_tokens", "draft_window", "adaptive")

_SPARE_STATES = 2

# Of a release that does not have one of them, or cannot import it here, what it has in its place is imported later.
_IMPORTED_WHILE_BUILT = (
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sglang.srt.distributed.device_communicators.all_reduce_utils",
    "sglang.srt.distributed.device_communicators.custom_all_reduce",
    "sglang.srt.distributed.device_communicators.hpu_communicator",
    "sglang.srt.distributed.device_communicators.pcie_ipc_ar",
    "sglang.srt.distributed.device_communicators.pymscclpp",
    "sglang.srt.distributed.device_communicators.shm_broadcast",
    "sglang.srt.distributed.device_communicators.torch_symm_mem",
    "sglang.srt.distributed.device_communicators.xpu_communicator",
    "sglang.srt.dllm.algorithm",
    "sglang.srt.mem_cache.rust_tree_core.adapter",
    "sglang.srt.mem_cache.rust_tree_core.extension",
    "sglang.srt.model_loader.expert_pack_config",
    "sglang.kernels.ops.attention.verify_mla",
    "sglang.kernels.ops.attention.verify_splitkv",
    "eagletwin.harness.engines.sglang.boot.served.llama",
)
# And what each process that runs cases would import at its first.
_IMPORTED_WHILE_RUN = (
    "sglang.kernels.cake_kernels.sampling",
    "sglang.srt.layers.attention.dsv4.unified_kv_gate",
    "sglang.srt.layers.moe.fused_moe_native",
    "sglang.srt.mem_cache.prefill_budget",
)


def import_sglang(mode: Mode = CPU) -> None:
    """Everything that is the same for all configurations. Takes seconds; once per process."""
    preimport.prepare(mode)
    stubs.come_first()
    if mode.device == "cpu":
        state_layers.name_the_cpu(SHIMS)
    for name in (
        "sglang.srt.managers.scheduler",
        "sglang.srt.speculative.eagle_worker_v2",
        "sglang.srt.speculative.multi_layer_eagle_worker_v2",
        "sglang.srt.speculative.eagle_utils",
        "sglang.srt.models.llama_eagle",
        "sglang.srt.models.llama_eagle3",
    ):
        importlib.import_module(name)
    if mode.device == "cpu":
        verify.choose(SHIMS)
        verify.install(SHIMS)
        state_layers.let_cuda_be_the_cpu(SHIMS)
        # What each scheduler imports while it is built or runs: imported here once, and not in each fork
        import_early((*_IMPORTED_WHILE_BUILT, *_IMPORTED_WHILE_RUN, *_modules_in("sglang.srt.arg_groups")), SHIMS)


def _modules_in(package: str) -> list[str]:
    """The modules of a package; none of one that a release does not have, or cannot import here."""
    import_early((package,), SHIMS)
    found = sys.modules.get(package)
    return [] if found is None else [f"{package}.{module.name}" for module in pkgutil.iter_modules(found.__path__)]


def import_models(case: Case, mode: Mode) -> None:
    """What must be imported otherwise than a patch would that names it. Call it before patches are applied."""
    recipe = RECIPES[case.model]
    if recipe.target.states and mode.device == "cpu":
        state_layers.import_models(family_of(recipe).modules, SHIMS)


def build_scheduler(case: Case, mode: Mode = CPU, rank: int = 0, port: int = 0, *, plain: bool = False) -> Any:
    """The real Scheduler, with its target and draft workers, for this case's configuration. Raises NotDriven, and what SGLang
    raises.

    rank, port: of several ranks, this one; it returns when all have met at the port. plain: without speculative decoding.
    """
    from sglang.srt.managers import scheduler as scheduler_module
    from sglang.srt.server_args import PortArgs, ServerArgs

    recipe, settings = RECIPES[case.model], case.engine.sglang
    if recipe.target.states:
        if mode.device == "cpu":
            state_layers.use_triton(SHIMS, family_of(recipe).modules, scans=recipe.target.scan is not None)
        elif recipe.target.scan is None:
            cuda.compute_states_in_float32(SHIMS)
    if recipe.frozen:
        workers.refuse_frozen(family_of(recipe).modules)
    os.environ.update(family_of(recipe).environment)
    if recipe.target.compressed is not None:  # before its classes are imported
        compressed_attention.mix_with_triton(SHIMS)
    registry.register(family_of(recipe).modules, SHIMS)
    if recipe.target.states and mode.device == "cuda":
        cuda.rotate_in_float32(SHIMS)
    if mode.device == "cuda" and mode.dtype == "float32" and recipe.target.routed:
        cuda.compute_experts_in_float32(SHIMS)
    if mode.device == "cpu":
        _make_able(case, mode)
        if mode.graphs or settings.cuda_branches:
            install.copy_between_host_and_device(SHIMS)
        if settings.cuda_branches:
            gates.take_cuda_branches(SHIMS)
        if mode.graphs:
            install.prepare(mode, frozen=recipe.frozen, shims=SHIMS)
            if mode.dp > 1:
                dp_attention.meet_in_graphs(SHIMS)
    if settings.host_pages:
        memory.prepare_host_cache(SHIMS, mode.device)
    if case.sessions:
        memory.prepare_sessions(SHIMS)
    _refuse_what_is_not_driven(case, mode, scheduler_module)
    if plain:
        speculation.order_penalties(SHIMS)
    else:
        workers.choose(case, SHIMS)
    wanted = _arguments(case, mode)
    arguments = ServerArgs(**(speculation.plain_arguments(wanted) if plain else wanted), **_several(mode), nccl_port=port)
    ports = dp_attention.ports_of(arguments) if mode.dp > 1 else PortArgs.init_new(arguments)
    stage = single_rank.stage_of(mode, rank) if mode.pp > 1 else 0
    workers.publish(scheduler_module, arguments, 0 if mode.pp > 1 else rank, stage)
    ranks = workers.ranks_of(scheduler_module.Scheduler, rank)
    with cuda.watch_captures(mode, frozen=recipe.frozen, indexed=recipe.target.index is not None):
        scheduler = scheduler_module.Scheduler(arguments, ports, **ranks)
    if recipe.target.states and not hasattr(scheduler.req_to_token_pool, "mamba_allocator"):
        raise NotDriven("layers that keep a state: this release has no allocator of their slots (0.5.13 and later have)")
    _remove_leftovers(scheduler)
    if settings.update_weights:
        new_weights.give(scheduler, case.model, settings.update_weights, mode.tp)
    if case.constrains:
        grammars.give(scheduler, recipe.target.vocab_size, recipe.end_of_sequence, mode, SHIMS)
    return scheduler


def _make_able(case: Case, mode: Mode) -> None:
    """What a CPU needs before a scheduler of this configuration can be built."""
    verify.choose(SHIMS)
    if mode.overlap or (RECIPES[case.model].frozen and workers.overlaps(case)):
        workers.allow_overlap(SHIMS)
    if mode.processes == 1:
        single_rank.meet_nobody(SHIMS)
    if mode.dp > 1:
        dp_attention.run_on_cpu(SHIMS)
    if case.samples:
        verify.open_gate(SHIMS)
    if case.engine.sglang.deterministic:
        verify.leave_kernels_as_they_are(SHIMS)
    if case.adapters:
        attention.run_adapters_on_cpu(SHIMS)
    if mode.attention == "fa3":
        attention.use_flash_attention(SHIMS)
    elif RECIPES[case.model].mtp_layers:
        attention.use_triton(SHIMS)
    if RECIPES[case.model].target.latent is not None or RECIPES[case.model].target.compressed is not None:
        attention.allow(SHIMS)
    if RECIPES[case.model].target.index is not None:
        sparse_attention.run_on_cpu(SHIMS)
    if RECIPES[case.model].target.compressed is not None:
        compressed_attention.run_on_cpu(SHIMS)


def _refuse_what_is_not_driven(case: Case, mode: Mode, scheduler_module: Any) -> None:
    """Raises NotDriven for what no release is driven with, and for what this one does not have."""
    if why := not_driven(case, mode):
        raise NotDriven(why)
    if mode.device == "cuda":
        cuda.refuse(mode)
    if mode.pp > 1:
        single_rank.refuse()
    if mode.processes > 1 and not workers.drives_ranks(scheduler_module):
        raise NotDriven(
            f"this release has no {workers.RECEIVE_OF_RANKS}, by which several ranks are driven (0.5.13 and later have)"
        )
    if mode.dp > 1:
        dp_attention.refuse()
    _refuse_what_requests_ask(case, mode)
    if case.adapters:
        case_requests.refuse()
    if case.engine.sglang.adaptive is not None:
        adaptive.refuse(case.engine.sglang.adaptive)


def _refuse_what_requests_ask(case: Case, mode: Mode) -> None:
    """Raises NotDriven for what this release gives no request."""
    if case.constrains:
        grammars.refuse(case, mode)
    if any(request.hidden_states == "last" for request in case.requests) and not requests.knows_last_state():
        raise NotDriven(
            "hidden_states 'last': this release gives hidden states of all tokens, or none (0.5.17 and later have it)"
        )


def _several(mode: Mode) -> dict[str, int]:
    ranks = {"tp_size": mode.tp * mode.dp} | (dp_attention.arguments(mode.dp) if mode.dp > 1 else {})
    return ranks | ({"pp_size": mode.pp} if mode.pp > 1 else {})


def _arguments(case: Case, mode: Mode) -> dict[str, Any]:
    """Fields of SGLang's ServerArgs."""
    recipe, settings = RECIPES[case.model], case.engine.sglang
    named: Dtype = mode.dtype if family_of(recipe).names_type else "float32"
    target, draft = other_checkpoints(case.model) if settings.update_weights else checkpoints(case.model, named)
    return dict(
        model_path=str(target),
        speculative_draft_model_path=str(draft),
        speculative_algorithm=recipe.algorithm,
        speculative_num_steps=case.num_steps,
        speculative_eagle_topk=case.topk,
        speculative_num_draft_tokens=case.verify_nodes,
        page_size=case.page_size,
        chunked_prefill_size=case.chunked_prefill_size * mode.dp,  # SGLang shares both out among ranks of DP attention
        disable_radix_cache=not settings.radix_cache,
        enable_multi_layer_eagle=recipe.mtp_layers > 0,
        swa_full_tokens_ratio=1.0,  # slots of layers with a window: as many as of others, since no window here is left
        max_running_requests=settings.max_running_requests * mode.dp,
        max_total_tokens=settings.max_total_tokens,
        context_length=settings.context_length or None,
        device=mode.device,
        dtype=mode.dtype,
        attention_backend=_attention_backend(recipe, mode),
        triton_attention_num_kv_splits=1,  # more splits change the order of sums, and so the last bits
        sampling_backend="pytorch",
        disable_overlap_schedule=not (mode.overlap or workers.overlaps(case)),
        **cuda.graph_arguments(mode),
        **family_of(recipe).arguments(recipe),
        **(compressed_attention.arguments(mode.device) if recipe.target.compressed is not None else {}),
        **_state_arguments(case, mode.dp),
        **_expert_arguments(recipe, mode),
        **memory.host_cache_arguments(settings, case.page_size, mode.device),
        **adaptive.arguments(settings.adaptive),
        **_of_dimensions(case),
        **case_requests.arguments(case),
        **grammars.arguments(case),
        disable_custom_all_reduce=True,
        skip_tokenizer_init=True,
        mem_fraction_static=0.5,
        random_seed=0,
        log_level="error",
    )


def _attention_backend(recipe: Recipe, mode: Mode) -> str:
    """The mode's, but for a model that has one of its own."""
    if recipe.target.compressed is not None:
        return compressed_attention.BACKEND
    return mode.attention if recipe.target.index is None else sparse_attention.BACKEND


def _of_dimensions(case: Case) -> dict[str, Any]:
    """Named only where the case has what needs them: older releases do not know them. Raises NotDriven for one of these."""
    from sglang.srt.server_args import ServerArgs

    found = {name: value for dimension in DIMENSIONS.values() for name, value in dimension.arguments(case).items()}
    if missing := [name for name in found if name not in inspect.signature(ServerArgs).parameters]:
        raise NotDriven(f"ServerArgs of this release has no {', '.join(missing)}")
    return found


def _state_arguments(case: Case, ranks: int) -> dict[str, Any]:
    """Slots for states: SGLang would make as many as fit into the memory. A few more than requests may run at once: slots are
    used again. SGLang shares them out among ranks of DP attention."""
    if not RECIPES[case.model].target.states:
        return {}
    running = case.engine.sglang.max_running_requests
    if not case.engine.sglang.radix_cache:
        return {"max_mamba_cache_size": (running + _SPARE_STATES) * ranks}
    # what SGLang takes on a GPU, where batches overlap: states are tracked while a request runs, in further slots of its own
    tracked = {state_layers.strategy_argument(): "extra_buffer", "mamba_track_interval": TRACKED_EVERY}
    return {"max_mamba_cache_size": (5 * running + _SPARE_STATES) * ranks, **tracked}


def _expert_arguments(recipe: Recipe, mode: Mode) -> dict[str, str]:
    """Triton's kernels of experts. SGLang chooses them by itself, with two exceptions: on a GPU CUTLASS's for Nemotron-H, which
    know no float32; and for gpt-oss, on a CPU as well, those of the package triton_kernels, where it is installed.
    """
    if recipe.target.routed and (mode.device == "cuda" or recipe.target.clamped is not None):
        return {"moe_runner_backend": "triton"}
    return {}


def changed_settings(scheduler: Any, case: Case, mode: Mode = CPU) -> str:
    """Settings that SGLang silently made others of than those it was given; empty if none. A case says what it runs with."""
    settings = case.engine.sglang
    asked: dict[str, Any] = {
        "topk": case.topk,
        "num_steps": case.num_steps,
        "num_draft_tokens": case.verify_nodes,
        "page_size": case.page_size,
        "chunked_prefill_size": case.chunked_prefill_size,
        "max_running_requests": settings.max_running_requests,
        "max_total_tokens": settings.max_total_tokens,
        "dtype": mode.dtype,
        "overlap": mode.overlap or workers.overlaps(case),
        # a graph for more requests than may run at once is of no use: SGLang makes one for as many as may
        "graphs": tuple(sorted({min(n, settings.max_running_requests) for n in mode.graphs})),
    }
    if settings.draft_window:  # releases before 0.5.23 have it for EAGLE-3 alone, and leave it out elsewhere
        asked["draft_window"] = (settings.draft_window, settings.draft_sink)
    if settings.host_pages:
        asked["host_pages"] = settings.host_pages
    if settings.adaptive is not None:  # switched off where SGLang has none
        asked["adaptive"] = True
    if settings.mixed_chunks:  # older releases switch it off for speculative decoding
        asked["mixed_chunks"] = True
    if mode.device == "cuda" or mode.attention != "triton":
        target = RECIPES[case.model].target
        if target.compressed is None and target.index is None:
            asked["attention"] = speculation.backend_class(mode.attention, latent=target.latent is not None)
    if scheduler.draft_worker is None:  # plain, or an earlier stage of a pipeline, which does not overlap either
        asked = {name: value for name, value in asked.items() if name not in _OF_DRAFTS} | {"overlap": False}
    return differing(scheduler, asked)


def differing(scheduler: Any, asked: dict[str, Any]) -> str:
    """What a scheduler uses other than these settings, by name; empty if nothing."""
    worker = scheduler.draft_worker
    used: dict[str, Any] = {
        "page_size": scheduler.page_size,
        "chunked_prefill_size": scheduler.chunked_prefill_size,
        "mixed_chunks": scheduler.is_mixed_chunk,
        "max_running_requests": scheduler.max_running_requests,
        "max_total_tokens": scheduler.max_total_num_tokens,
        "dtype": str(max(scheduler.tp_worker.model_runner.model.parameters(), key=Tensor.numel).dtype).removeprefix("torch."),
        "overlap": bool(scheduler.enable_overlap),
        "graphs": cuda.captured_batch_sizes(scheduler),
        "attention": speculation.attention_backends(scheduler),
        "host_pages": memory.host_cache_pages(scheduler),
    }
    if worker is not None:
        used |= {
            "topk": worker.topk,
            "num_steps": worker.speculative_num_steps,
            "num_draft_tokens": worker.speculative_num_draft_tokens,
            "adaptive": adaptive.controller(scheduler) is not None,
            "draft_window": speculation.draft_window(scheduler),
        }
    return ", ".join(f"{name} from {value} to {used[name]}" for name, value in asked.items() if value != used[name])


def _remove_leftovers(scheduler: Any) -> None:
    """Unlink what the scheduler made for processes that do not exist here: its load snapshot in /dev/shm (small in
    containers), and the socket files in this engine's own TMPDIR."""
    snapshot = getattr(getattr(scheduler, "load_snapshot_writer", None), "path", None)
    if isinstance(snapshot, str):
        Path(snapshot).unlink(missing_ok=True)
    for leftover in Path(tempfile.gettempdir()).glob("tmp*"):
        if not leftover.is_dir():
            leftover.unlink(missing_ok=True)
