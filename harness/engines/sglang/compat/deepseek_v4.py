"""What DeepSeek-V4's backend and pool want to be built with: where configuration lies, and which sizes a pool is given."""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from ..blame import hand_on

_CONTEXT = "sglang.srt.runtime_context"
_ONE_RANK = {"attn_tp_size": 1, "attn_tp_rank": 0, "attn_cp_size": 1, "attn_cp_rank": 0}


@contextlib.contextmanager
def configured(**fields: Any) -> Iterator[Any]:
    """The release's server arguments with these fields, where its classes look for them; one rank.

    Up to 0.5.14 they are a global of server_args, then a slot of the runtime context, and since 0.5.16 it takes single fields.
    """
    context = importlib.import_module(_CONTEXT) if importlib.util.find_spec(_CONTEXT) is not None else None
    with contextlib.ExitStack() as stack:
        if context is not None:
            stack.enter_context(context.get_parallel().override(**_ONE_RANK))
        if context is not None and hasattr(context.get_context(), "override_server_args"):
            override = context.get_context().override_server_args(**fields)
            stack.callback(override.restore)
            yield override.install()
            return
        module = importlib.import_module("sglang.srt.server_args")
        arguments = SimpleNamespace(**_defaults(module.ServerArgs) | fields)
        slot = context is not None and hasattr(context.get_context(), "_server_args")
        holder, name = (context.get_context(), "_server_args") if context and slot else (module, "_global_server_args")
        stack.callback(setattr, holder, name, getattr(holder, name))
        setattr(holder, name, arguments)
        yield arguments


def _defaults(arguments: type) -> dict[str, Any]:
    """What a field holds that nobody sets. ServerArgs itself looks at the machine when it is made."""
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(arguments)
    }


def pool(kind: type, page_size: int, slots: int, requests: int) -> Any:
    """A DeepSeekV4TokenToKVPool of one draft layer, as NextN's: it compresses nothing, and attends to a window.

    slots: of the pool of all positions, and of that of the window.
    """
    sizes = {"max_num_reqs": requests, "swa_size": slots, "c4_size": page_size, "c128_size": page_size, "full_size": slots}
    states = {"c4_state_pool_size": requests, "c128_state_pool_size": requests, "state_dtype": torch.float32}
    states |= {"c4_state_dtype": torch.float32, "c128_state_dtype": torch.float32}
    model = {"qk_nope_head_dim": 448, "qk_rope_head_dim": 64, "indexer_head_dim": 128, "dtype": torch.float8_e4m3fn}
    layers = {"layer_num": 1, "compression_ratios": [0], "is_draft_worker": True}
    where = {"page_size": page_size, "swa_page_size": 128, "device": "cpu", "enable_memory_saver": False}
    known = inspect.signature(kind).parameters
    given: dict[str, Any] = {**sizes, **states, **model, **layers, **where}
    return kind(**{name: value for name, value in given.items() if name in known})


@contextlib.contextmanager
def slots_side_by_side(metadata: type) -> Iterator[None]:
    """A DSV4AttnMetadata whose plan of compression gets a step's slots side by side.

    Up to 0.5.20 a draft plans compression, although no layer of it compresses: by a kernel that reads slots without their
    stride, and those of a step are a view of all steps'. Its results serve nothing there; the access ends the run here.
    """
    if any(field.name == "present_ratios" for field in dataclasses.fields(metadata)):
        yield
        return
    original = metadata.init_compression_metadata  # type: ignore[attr-defined]

    def side_by_side(self: Any, *args: Any, **kwargs: Any) -> None:
        self.raw_out_loc = self.raw_out_loc.contiguous()
        hand_on(original, self, *args, **kwargs)

    with patch.object(metadata, "init_compression_metadata", side_by_side):
        yield


@contextlib.contextmanager
def as_on_hopper() -> Iterator[None]:
    """Without DeepGEMM's indexer, which no Hopper has; 0.5.21 asks CUDA for its generation, which ends a process without it."""
    indexer = sys.modules.get("sglang.srt.layers.attention.dsv4.v41_indexer")
    if indexer is None:
        yield
        return
    with patch.object(indexer, "is_sm100_or_newer", lambda: False):
        yield
