"""Single functions of SGLang that no case reaches without a GPU, called for real, with what they need around them put in place.

Each answers with plain numbers; what they must be is the caller's to say (harness/check/function_calls.py).
"""

import contextlib
import importlib.util
import inspect
import os
import socket
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from eagletwin.harness.engines import triton_cpu, wire

from . import deepseek_v4, patches


class NoSuchFunction(Exception):
    """The release has no such function."""


class _Refused(Exception):
    """A step does not take the slots that it is handed."""


def _draft_steps(committed: list[int], slots: list[int]) -> tuple[list[list[int]], list[deepseek_v4.StepPlan]]:
    """(slots that each step of draft decode is handed, what it plans) of DeepSeek-V4's multi-step draft backend, without a
    CUDA graph. Where the backend refuses what it is handed, no step has a plan.

    committed  tokens of each request; slots: the batch's, as the worker allots them: as many as steps of each request, one
               after the other. Request r has the slots 1000 * (r + 1) + column, and the window's pool the same.
    """
    if importlib.util.find_spec(deepseek_v4.BACKEND) is None:
        raise NoSuchFunction("the release has no DeepSeek-V4 backend")
    columns, requests = 2 * deepseek_v4.PAGE_SIZE, len(committed)
    table = 1000 * torch.arange(1, requests + 1)[:, None] + torch.arange(columns)
    window = torch.arange(1000 * (requests + 1) + columns)
    window[-1] = -1
    handed: dict[int, list[int]] = {}

    def noted(step: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def decode(**arguments: Any) -> Any:
            handed[step] = arguments["out_cache_loc"].tolist()
            try:
                return original(**arguments)
            except AssertionError as error:
                raise _Refused from error

        return decode

    plans: list[deepseek_v4.StepPlan] = []
    with (
        triton_cpu.installed(),
        deepseek_v4.draft_backend(table.int(), window, len(slots) // requests) as backend,
        contextlib.suppress(_Refused),
    ):
        for step, of in enumerate(backend.attn_backends):
            of.init_forward_metadata_decode = noted(step, of.init_forward_metadata_decode)
        plans = deepseek_v4.plan(backend, range(requests), committed, slots)
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


def serve(connection: socket.socket, probe: wire.Probe) -> NoReturn:
    """Answer one probe, and end."""
    try:
        for patch in probe.patches:
            patches.apply(patch)
        wire.send(connection, wire.Probed(PROBES[probe.name](**probe.given)))
    except BaseException as error:
        wire.send(connection, wire.Refused(f"{type(error).__name__}: {error}", traceback.format_exc()))
    os._exit(0)


PROBES: dict[str, Callable[..., list[list[int]]]] = {
    "step_slots": step_slots,
    "step_reads": step_reads,
    "kept_states": kept_states,
}
