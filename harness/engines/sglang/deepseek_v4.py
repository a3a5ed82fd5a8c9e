"""SGLang's multi-step draft backend of DeepSeek-V4 on a CPU: its own classes and pools, of one draft layer.

Before the first step of draft decode it plans all of them: which slots a step writes, and which it reads. The plan is made in
torch and in Triton kernels, which run here. Beside it lie schedules of FlashMLA, of DeepGEMM's indexer and of the
compressors, made by code that a GPU needs: none of them holds a slot, a draft layer of NextN needs the first alone, and none
is made here. Attention itself is FlashMLA, and does not run.
"""

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from .eras import deepseek_v4 as era

BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
PAGE_SIZE, WINDOW = 256, 128  # the backend demands the first; the second is its SWA_WINDOW
_HEAD = 512  # it demands this, too


@dataclass(frozen=True)
class StepPlan:
    """What one step of draft decode is planned to do, a number or a list for each request.

    writes         slots of the rows that it writes
    window_writes  the same in the pool of the window; empty: the release translates them when it stores
    length         how many rows of the request lie before and at its own, as far as the step is told
    position       where it stands, as far as it is told
    reads          slots in the pool of the window that it attends to, the oldest first
    pages          the request's pages
    """

    writes: list[int]
    window_writes: list[int]
    length: list[int]
    position: list[int]
    reads: list[list[int]]
    pages: list[list[int]]


@contextlib.contextmanager
def draft_backend(req_to_token: Tensor, full_to_window: Tensor, num_steps: int) -> Iterator[Any]:
    """A DeepseekV4MultiStepBackend of a chain of num_steps, for as long as the block takes.

    req_to_token    [requests, columns] int32: slots of the pool of all positions, columns a multiple of PAGE_SIZE
    full_to_window  [slots + 1] int64: slot of the window's pool for each of these; the last entry is -1, for no slot
    """
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    module = importlib.import_module(BACKEND)
    requests, columns = req_to_token.shape
    arguments = {
        "attention_backend": "dsv4",
        "device": "cpu",
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 1,
        "speculative_num_steps": num_steps,
        "speculative_num_draft_tokens": num_steps + 1,
    }
    with _without_schedules(module), era.configured(**arguments) as server_arguments:
        pool = era.pool(DeepSeekV4TokenToKVPool, PAGE_SIZE, len(full_to_window) - 1, requests)
        pool.register_mapping(full_to_window)
        runner = SimpleNamespace(
            device="cpu",
            page_size=PAGE_SIZE,
            model_config=SimpleNamespace(
                context_len=columns,
                head_dim=_HEAD,
                v_head_dim=_HEAD,
                hf_text_config=SimpleNamespace(index_topk=_HEAD),
            ),
            req_to_token_pool=SimpleNamespace(req_to_token=req_to_token, size=requests),
            token_to_kv_pool=pool,
            hisparse_coordinator=None,
            is_draft_worker=True,
            server_args=server_arguments,
            spec_algorithm=SpeculativeAlgorithm.EAGLE,
        )
        yield module.DeepseekV4MultiStepBackend(runner, 1, num_steps)


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
        "req_to_token_pool": SimpleNamespace(req_to_token=backend.req_to_token),  # up to 0.5.12.post1
    }
    known = {field.name for field in dataclasses.fields(ForwardBatch)}
    backend.init_forward_metadata(ForwardBatch(**{name: value for name, value in given.items() if name in known}))
    planned = [of for of in backend.attn_backends if of.forward_metadata is not None]
    return [plan_of(of) for of in planned]


def plan_of(of: Any) -> StepPlan:
    """What the backend of a step has planned."""
    if hasattr(of, "_maybe_upgrade_forward_metadata"):  # up to 0.5.12.post1 the first layer makes the rest of the plan
        of._maybe_upgrade_forward_metadata()
    core = of.forward_metadata.core_attn_metadata
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
