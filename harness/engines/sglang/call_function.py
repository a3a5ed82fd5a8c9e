"""Single functions of SGLang that no case reaches without a GPU, called for real, with what they need around them put in place.

Each answers with plain numbers; what they must be is the caller's to say (harness/check/function_calls.py).
"""

import contextlib
import dataclasses
import importlib.util
import inspect
import os
import socket
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from eagletwin.harness.engines import wire


class NoSuchFunction(Exception):
    """The release has no such function."""


class _Recorded(BaseException):
    """The call that was waited for has come; nothing after it matters."""


def step_slots(committed: list[int], slots: list[int]) -> list[list[int]]:
    """The slots that DeepSeek-V4's multi-step draft backend plans each draft decode step to write, without a CUDA graph.

    committed  tokens of each request; slots: the batch's, as the worker allots them: as many as steps of each request, one
               after the other
    The real init_forward_metadata runs down to init_forward_metadata_decode, which only notes what it is handed: what it
    makes of that needs kernels of a GPU.
    """
    name = "sglang.srt.layers.attention.deepseek_v4_backend"
    if importlib.util.find_spec(name) is None:
        raise NoSuchFunction("the release has no DeepSeek-V4 backend")
    module = importlib.import_module(name)
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    handed: dict[int, list[int]] = {}
    num_steps = len(slots) // len(committed)

    class Backend(module.DeepseekV4AttnBackend):  # type: ignore[misc,name-defined]
        def __init__(self, step: int) -> None:
            self.topk, self.speculative_num_steps, self.speculative_step_id = 1, num_steps, step
            self.mtp_enabled, self.page_size, self.swa_page_size = True, 256, 128
            self.req_to_token, self.req_to_token_pool = pool.req_to_token, pool
            # 0.5.16 and later: the state of a compressor, which decode metadata without a graph does not use
            self.online_c128_mtp = SimpleNamespace(prepare_forward=lambda *args, **kwargs: None)

        def init_forward_metadata(self, forward_batch: Any) -> None:
            try:
                super().init_forward_metadata(forward_batch)
            except _Recorded:
                return
            raise RuntimeError("init_forward_metadata came to its end without init_forward_metadata_decode")

        def init_forward_metadata_decode(self, **arguments: Any) -> None:
            handed[self.speculative_step_id] = arguments["out_cache_loc"].tolist()
            raise _Recorded

    class MultiStep(module.DeepseekV4MultiStepBackend):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.topk, self.speculative_num_steps = 1, num_steps
            self.attn_backends = [Backend(step) for step in range(num_steps)]

    lengths = torch.tensor(committed)
    pool = SimpleNamespace(req_to_token=torch.zeros(len(committed), 1024, dtype=torch.int32))
    given = {
        "forward_mode": ForwardMode.DECODE,
        "batch_size": len(committed),
        "input_ids": torch.zeros_like(lengths),
        "req_pool_indices": torch.arange(len(committed)),
        "seq_lens": lengths,
        "seq_lens_cpu": lengths,
        "seq_lens_sum": sum(committed),
        "out_cache_loc": torch.tensor(slots),
        "req_to_token_pool": pool,  # up to 0.5.12.post1, and some later ones
    }
    known = {field.name for field in dataclasses.fields(ForwardBatch)}
    MultiStep().init_forward_metadata(ForwardBatch(**{name: value for name, value in given.items() if name in known}))
    return [handed[step] for step in sorted(handed)]


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
        wire.send(connection, wire.Probed(PROBES[probe.name](**probe.given)))
    except BaseException as error:
        wire.send(connection, wire.Refused(f"{type(error).__name__}: {error}", traceback.format_exc()))
    os._exit(0)


PROBES: dict[str, Callable[..., list[list[int]]]] = {"step_slots": step_slots, "kept_states": kept_states}
