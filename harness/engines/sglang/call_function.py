"""Single functions of SGLang that no case reaches without a GPU, called for real, with what they need around them put in place.

Each answers with plain numbers; what they must be is the caller's to say (harness/check/trials.py).
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor

from eagletwin.harness.engines import protocol, triton_cpu
from eagletwin.harness.engines.inside import patches

from .compat import kernel_modules as era

# SGLang's multi-step draft backends of DeepSeek-V4 and of DSA on a CPU: their own classes, for one draft layer.
#
# Before the first step of draft decode such a backend plans all of them: which slots a step writes, and which it reads. The
# plan is made in torch and in Triton kernels, which run here. Beside it lie schedules of FlashMLA, of DeepGEMM's indexer and of
# the compressors, made by code that a GPU needs: none of them holds a slot, a draft layer of NextN needs the first alone, and
# none is made here. Attention itself is FlashMLA or FlashAttention, and does not run.

BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
PAGE_SIZE, WINDOW = 256, 128  # the backend demands the first; the second is its SWA_WINDOW
_HEAD = 512  # it demands this, too

DSA_PAGE, DSA_TOPK = 64, 128  # its indexer demands the first; a model chooses how many rows a query attends to


@dataclass(frozen=True)
class StepPlan:
    """What one step of draft decode is planned to do, a number or a list for each request.

    length         how many rows of the request lie before and at its own, as far as the step is told
    reads          slots that it attends to, the oldest first: of V4 in the pool of the window, of DSA those to choose from
    pages          the request's pages
    chosen         DSA: how many of them it chooses

    V4 alone, DSA's plan has none:
    writes         slots of the rows that it writes
    window_writes  the same in the pool of the window; empty: the release translates them when it stores
    position       where it stands, as far as it is told
    """

    length: list[int]
    reads: list[list[int]]
    pages: list[list[int]]
    chosen: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    window_writes: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)


@contextlib.contextmanager
def draft_backend(req_to_token: Tensor, full_to_window: Tensor, num_steps: int) -> Iterator[Any]:
    """A DeepseekV4MultiStepBackend of a chain of num_steps, for as long as the block takes.

    req_to_token    [requests, columns] int32: slots of the pool of all positions, columns a multiple of PAGE_SIZE
    full_to_window  [slots + 1] int64: slot of the window's pool for each of these; the last entry is -1, for no slot
    """
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    module = importlib.import_module(BACKEND)
    with _without_schedules(module), _configured("dsv4", num_steps) as server_arguments:
        requests, columns = req_to_token.shape
        pool = era.deepseek_v4_pool(DeepSeekV4TokenToKVPool, PAGE_SIZE, len(full_to_window) - 1, requests)
        pool.register_mapping(full_to_window)
        sizes = SimpleNamespace(
            context_len=columns, head_dim=_HEAD, v_head_dim=_HEAD, hf_text_config=SimpleNamespace(index_topk=_HEAD)
        )
        runner = _runner(
            req_to_token, pool, PAGE_SIZE, sizes, server_args=server_arguments, spec_algorithm=SpeculativeAlgorithm.EAGLE
        )
        yield module.DeepseekV4MultiStepBackend(runner, 1, num_steps)


@contextlib.contextmanager
def dsa_draft_backend(req_to_token: Tensor, num_steps: int) -> Iterator[Any]:
    """A DeepseekSparseAttnMultiStepBackend, or what it was before 0.5.13, for as long as the block takes.

    req_to_token  [requests, columns] int32: columns a multiple of DSA_PAGE
    """
    found = era.dsa_backend()
    if found is None:
        raise NoSuchFunction("the release has no DSA backend")
    module, name = found
    config = SimpleNamespace(architectures=["DeepseekV3ForCausalLMNextN"], index_topk=DSA_TOPK)
    width = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    pool = SimpleNamespace(dsa_kv_cache_store_fp8=False, nsa_kv_cache_store_fp8=False, kv_cache_dim=576, dtype=torch.bfloat16)
    sizes = SimpleNamespace(hf_config=config, context_len=req_to_token.shape[1], num_attention_heads=16, **width)
    with era.dsa_without_a_gpu(module), _configured("dsa", num_steps) as server_arguments:
        runner = _runner(
            req_to_token, pool, DSA_PAGE, sizes, server_args=server_arguments, kv_cache_dtype=pool.dtype, max_running_requests=8
        )
        yield getattr(module, name)(runner, 1, num_steps)


def _configured(name: str, num_steps: int) -> contextlib.AbstractContextManager[Any]:
    """SGLang configured for EAGLE with this backend, and chains of num_steps."""
    return era.draft_configured(
        attention_backend=name,
        device="cpu",
        speculative_algorithm="EAGLE",
        speculative_eagle_topk=1,
        speculative_num_steps=num_steps,
        speculative_num_draft_tokens=num_steps + 1,
        **era.DSA_KERNELS if name == "dsa" else {},
    )


def _runner(req_to_token: Tensor, pool: Any, page_size: int, sizes: Any, **more: Any) -> Any:
    """What a backend reads of the draft's ModelRunner."""
    return SimpleNamespace(
        device="cpu",
        page_size=page_size,
        model_config=sizes,
        req_to_token_pool=SimpleNamespace(req_to_token=req_to_token, size=len(req_to_token)),
        token_to_kv_pool=pool,
        hisparse_coordinator=None,
        is_draft_worker=True,
        **more,
    )


@contextlib.contextmanager
def _without_schedules(module: Any) -> Iterator[None]:
    """Without what only a GPU can make, and with the kernels that one would launch."""
    with contextlib.ExitStack() as stack:
        for name in ("_create_flashmla_metadata", "create_paged_compressor_data", "PagedIndexerMetadata"):
            stack.enter_context(patch.object(module, name, lambda **_: None))
        kernels = sys.modules.get(getattr(getattr(module, "BuildCausalSwaPageIndices", None), "__module__", ""))
        if kernels is not None:  # up to 0.5.15.post1 the plan is torch's, on a GPU too
            stack.enter_context(patch.object(kernels, "_inputs_on_cuda", lambda *_, **__: True))
        stack.enter_context(era.slots_side_by_side(module.DSV4AttnMetadata))
        stack.enter_context(era.as_on_hopper())
        yield


def plan(backend: Any, rows: Sequence[int], lengths: Sequence[int], slots: Sequence[int]) -> list[StepPlan]:
    """What each step is planned to do, without a CUDA graph. Raises what the backend raises.

    rows: of req_to_token, one a request; lengths: committed tokens; slots: the batch's, num_steps of each request, one request
    after the other, as the worker allots them.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    held = torch.tensor(lengths)
    given = {
        "forward_mode": ForwardMode.DECODE,
        "batch_size": len(lengths),
        "input_ids": torch.zeros_like(held),
        "req_pool_indices": torch.tensor(rows),
        "seq_lens": held,
        "seq_lens_cpu": held,
        "seq_lens_sum": sum(lengths),
        "out_cache_loc": torch.tensor(slots),
        "positions": held.clone(),
        "req_to_token_pool": SimpleNamespace(req_to_token=backend.attn_backends[0].req_to_token),  # up to 0.5.12.post1
    }
    known = {field.name for field in dataclasses.fields(ForwardBatch)}
    backend.init_forward_metadata(ForwardBatch(**{name: value for name, value in given.items() if name in known}))
    planned = [of for of in backend.attn_backends if getattr(of, "forward_metadata", None) is not None]
    return [plan_of(of) for of in planned]


def plan_of(of: Any) -> StepPlan:
    """What the backend of a step has planned."""
    if hasattr(of, "_maybe_upgrade_forward_metadata"):  # up to 0.5.12.post1 the first layer makes the rest of the plan
        of._maybe_upgrade_forward_metadata()
    core = getattr(of.forward_metadata, "core_attn_metadata", None)
    if core is None:
        return _dsa_plan_of(of.forward_metadata)
    window = getattr(core, "swa_out_cache_loc", None)
    counts = core.swa_topk_lengths.tolist()
    return StepPlan(
        writes=core.raw_out_loc.tolist(),
        window_writes=[] if window is None else window.tolist(),
        length=core.seq_lens_casual.tolist(),
        position=core.positions_casual.tolist(),
        reads=[row[:count][::-1] for row, count in zip(core.swa_page_indices.tolist(), counts, strict=True)],
        pages=core.page_table.tolist(),
    )


def _dsa_plan_of(metadata: Any) -> StepPlan:
    """The indexer scores the rows of pages up to the length, and attention gets those it chooses by their slots."""
    lengths = metadata.cache_seqlens_int32.tolist()
    chosen = getattr(metadata, "dsa_cache_seqlens_int32", None)
    return StepPlan(
        length=lengths,
        reads=[row[:length] for row, length in zip(metadata.page_table_1.tolist(), lengths, strict=True)],
        pages=metadata.real_page_table.tolist(),
        chosen=(metadata.nsa_cache_seqlens_int32 if chosen is None else chosen).tolist(),
    )


class NoSuchFunction(Exception):
    """The release has no such function."""


class _Refused(Exception):
    """A step does not take the slots that it is handed."""


def _draft_steps(committed: list[int], slots: list[int]) -> tuple[list[list[int]], list[StepPlan]]:
    """(slots that each step of draft decode is handed, what it plans) of DeepSeek-V4's multi-step draft backend, without a
    CUDA graph. Where the backend refuses what it is handed, no step has a plan.

    committed  tokens of each request; slots: the batch's, as the worker allots them: as many as steps of each request, one
               after the other. Request r has the slots 1000 * (r + 1) + column, and the window's pool the same.
    """
    if importlib.util.find_spec(BACKEND) is None:
        raise NoSuchFunction("the release has no DeepSeek-V4 backend")
    columns, requests = 2 * PAGE_SIZE, len(committed)
    table = 1000 * torch.arange(1, requests + 1)[:, None] + torch.arange(columns)
    window = torch.arange(1000 * (requests + 1) + columns)
    window[-1] = -1
    handed: dict[int, list[int]] = {}

    def wrap_decode(step: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def decode(**arguments: Any) -> Any:
            handed[step] = arguments["out_cache_loc"].tolist()
            try:
                return original(**arguments)
            except AssertionError as error:
                raise _Refused from error

        return decode

    plans: list[StepPlan] = []
    with (
        triton_cpu.installation(),
        draft_backend(table.int(), window, len(slots) // requests) as backend,
        contextlib.suppress(_Refused),
    ):
        for step, of in enumerate(backend.attn_backends):
            of.init_forward_metadata_decode = wrap_decode(step, of.init_forward_metadata_decode)
        plans = plan(backend, range(requests), committed, slots)
    return [handed[step] for step in sorted(handed)], plans


def step_slots(committed: list[int], slots: list[int]) -> list[list[int]]:
    """The slots that each step is planned to write; those that it was handed, where the backend refused them."""
    handed, plans = _draft_steps(committed, slots)
    return [of.writes for of in plans] if plans else handed


def step_reads(committed: list[int], slots: list[int]) -> list[list[int]]:
    """The slots that each step is planned to read, of one request after the other."""
    _, plans = _draft_steps(committed, slots)
    if not plans:
        raise RuntimeError("the backend refuses the slots that it is handed, and plans nothing (#26239)")
    return [[slot for reads in of.reads for slot in reads] for of in plans]


def dsa_step_reads(committed: list[int], slots: list[int]) -> list[list[int]]:
    """step_reads of DSA's multi-step backend: the slots whose rows each step may choose."""
    table = 1000 * torch.arange(1, len(committed) + 1)[:, None] + torch.arange(4 * DSA_PAGE)
    with dsa_draft_backend(table.int(), len(slots) // len(committed)) as backend:
        plans = plan(backend, range(len(committed)), committed, slots)
    return [[slot for reads in of.reads for slot in reads] for of in plans]


def _wide(values: list[int]) -> torch.Tensor:
    """A hidden state [n, 4] of each number."""
    return torch.tensor(values, dtype=torch.float32)[:, None].repeat(1, 4)


def _batch(states: list[int], lengths: torch.Tensor, rows: int) -> SimpleNamespace:
    """The batch that draft extend is given."""
    requests = torch.arange(len(lengths))
    return SimpleNamespace(
        extend_seq_lens=lengths.to(torch.int32),
        extend_start_loc=(requests * rows).to(torch.int32),
        req_pool_indices=requests,
        batch_size=len(requests),
        input_ids=torch.zeros(len(states), dtype=torch.int64),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        forward_metadata_ready=False,
        mark_forward_metadata_ready=lambda *args, **kwargs: None,
    )


def _buffers(stale: list[int], lengths: torch.Tensor, rows: int) -> SimpleNamespace:
    """The buffers of the last graph that ran."""
    requests = torch.arange(len(lengths))
    return SimpleNamespace(
        hidden_states=_wide(stale),
        req_pool_indices=requests,
        extend_seq_lens=lengths.to(torch.int32),
        extend_start_loc=(requests * rows).to(torch.int32),
    )


def _input_of(batch: SimpleNamespace) -> type:
    """What stands in for the draft's input: it hands the batch on."""

    class Input:
        def __init__(self, **arguments: Any) -> None:
            self.hidden_states = arguments["hidden_states"]

        def prepare_for_extend_to_fill_draft_kvcache(self, *_: Any, **__: Any) -> Any:
            batch.spec_info = self
            return batch

    return Input


def _worker(module: Any, batch: SimpleNamespace, buffers: SimpleNamespace, states: list[int]) -> Any:
    """The release's draft worker, without its layers and its graphs."""
    requests = batch.req_pool_indices
    rows = len(states) // len(requests)
    steps = rows - 1
    last = SimpleNamespace(buffers=buffers, **vars(buffers))  # 0.5.9 has the buffers on the runner itself

    class Worker(module.MultiLayerEagleDraftWorker):  # type: ignore[misc]
        def prepare_for_draft_extend(self, *_: Any, **__: Any) -> Any:  # 0.5.14: the worker's, no longer the input's
            batch.spec_info = SimpleNamespace()
            return batch

        def __init__(self) -> None:
            output = SimpleNamespace(next_token_logits=torch.eye(len(states), 8), hidden_states=_wide(states))
            layer = SimpleNamespace(
                forward=lambda *_, **__: SimpleNamespace(logits_output=output), req_to_token_pool=None, attn_backend=None
            )
            self.speculative_num_steps, self.speculative_num_draft_tokens, self.topk = steps, rows, 1
            self.device, self.plan_stream, self.plan_stream_ctx = "cpu", None, contextlib.nullcontext()
            self.draft_runner_list, self.chain_mtp_hidden_states = [layer] * steps, False
            self.req_to_hidden_states_pool = torch.zeros(len(requests), steps - 1, 4)
            self.cuda_graph_runner_for_draft_extend = SimpleNamespace(
                can_run=lambda _: False, can_run_graph=lambda _: False, get_last_runner=lambda: last
            )

    return Worker()


def kept_states(states: list[int], stale: list[int], num_steps: list[int]) -> list[list[int]]:
    """The hidden states that the multi-layer worker keeps of each request after draft extend, for the next CUDA graph, of a
    batch that is too large for the graphs it has captured.

    states  of each row of the batch, num_steps + 1 rows a request; stale: those in the buffers of the last graph that ran
    The real _draft_extend_for_decode runs; its draft layers and its graphs are stood in for.
    """
    name = "sglang.srt.speculative.multi_layer_eagle_worker_v2"
    module = importlib.import_module(name)
    [steps] = num_steps
    rows = steps + 1
    lengths = torch.full((len(states) // rows,), rows)
    if "req_to_hidden_states_pool" not in inspect.getsource(module.MultiLayerEagleDraftWorker):
        raise NoSuchFunction("the release keeps no hidden states for its graphs")

    batch, buffers = _batch(states, lengths, rows), _buffers(stale, lengths, rows)
    worker = _worker(module, batch, buffers, states)

    for made in ("EagleDraftInput", "EagleDraftExtendInput"):  # the second: 0.5.14
        vars(module)[made] = _input_of(batch)
    result = SimpleNamespace(
        logits_output=SimpleNamespace(hidden_states=_wide(states)),
        next_token_ids=torch.zeros(len(states), dtype=torch.int64),
        accept_lens=lengths,
        next_draft_input=SimpleNamespace(),
    )
    worker._draft_extend_for_decode(batch, result)
    return [[int(state) for state in kept[:, 0]] for kept in worker.req_to_hidden_states_pool]


def serve(connection: socket.socket, probe: protocol.Probe) -> NoReturn:
    """Answer one probe, and end."""
    try:
        for patch in probe.patches:
            patches.apply(patch)
        protocol.send(connection, protocol.Probed(PROBES[probe.name](**probe.given)))
    except BaseException as error:
        protocol.send(connection, protocol.Refused(f"{type(error).__name__}: {error}", traceback.format_exc()))
    os._exit(0)


PROBES: dict[str, Callable[..., list[list[int]]]] = {
    "step_slots": step_slots,
    "step_reads": step_reads,
    "dsa_step_reads": dsa_step_reads,
    "kept_states": kept_states,
}
