"""Single functions of SGLang that no case reaches without a GPU, called for real, with what they need around them put in place.

Each answers with plain numbers; what they must be is the caller's to say (harness/probes.py).
"""

import dataclasses
import importlib.util
import os
import socket
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from eagletwin.harness.engines import wire


class Absent(Exception):
    """The release has no such function."""


class _Recorded(BaseException):
    """The call that was waited for has come; nothing after it matters."""


def step_slots(committed: list[int], slots: list[int], num_steps: int) -> list[list[int]]:
    """The slots that DeepSeek-V4's multi-step draft backend plans each draft decode step to write, without a CUDA graph.

    committed  tokens of each request; slots: the batch's, as the worker allots them: num_steps of each request, one after the
               other
    The real init_forward_metadata runs down to init_forward_metadata_decode, which only notes what it is handed: what it
    makes of that needs kernels of a GPU.
    """
    name = "sglang.srt.layers.attention.deepseek_v4_backend"
    if importlib.util.find_spec(name) is None:
        raise Absent("the release has no DeepSeek-V4 backend")
    module = importlib.import_module(name)
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    handed: dict[int, list[int]] = {}

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


def serve(connection: socket.socket, probe: wire.Probe) -> NoReturn:
    """Answer one probe, and end."""
    try:
        answer = wire.Probed(PROBES[probe.name](probe.committed, probe.slots, probe.num_steps))
        wire.send(connection, answer)
    except BaseException as error:
        wire.send(connection, wire.Refused(f"{type(error).__name__}: {error}", traceback.format_exc()))
    os._exit(0)


PROBES: dict[str, Callable[..., list[list[int]]]] = {"step_slots": step_slots}
