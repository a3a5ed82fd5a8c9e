"""DP attention: how SGLang is started with it, what a CPU lacks for it, and what a rank knows of the tokens of all."""

import inspect
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
from torch import Tensor

from .. import blame


def arguments(ranks: int) -> dict[str, int]:
    """Of ServerArgs: so many ranks, each with requests of its own (0.5.23 names it so; before, a flag and `dp_size`)."""
    from sglang.srt.server_args import ServerArgs

    if "attn_dp_size" in inspect.signature(ServerArgs).parameters:
        return {"attn_dp_size": ranks}
    return {"dp_size": ranks, "enable_dp_attention": True}


def ports_of(arguments: Any) -> Any:
    """SGLang's PortArgs. With DP attention they are TCP ports, each of which is to be free; nobody listens at them here, and of
    two ranks one may have begun to meet the other at theirs."""
    from sglang.srt import server_args

    with patch.object(server_args, "wait_port_available", lambda *_args, **_kwargs: True, create=True):
        return server_args.PortArgs.init_new(arguments)


def run_on_cpu(shims: list[str]) -> None:
    """Idle batches, which have no request and no token, on a CPU."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.rotary_embedding import base
    from sglang.srt.model_executor import model_runner

    # forward_batch_info.py asks a backend of a CPU for it by this name
    TritonAttnBackend.get_cpu_graph_seq_len_fill_value = TritonAttnBackend.get_cuda_graph_seq_len_fill_value
    shims.append("TritonAttnBackend.get_cpu_graph_seq_len_fill_value: as on a GPU")
    # a CPU's padding of heads to whole shares of each rank: here each rank has them all
    model_runner.adjust_config_with_unaligned_cpu_tp = lambda config, *_args, **_kwargs: config
    shims.append("model_runner.adjust_config_with_unaligned_cpu_tp: leaves heads as they are")
    for kind in vars(base).values():
        if isinstance(kind, type) and "forward_native" in vars(kind):
            _rotate_nothing(kind)
    shims.append("rotary embedding in torch: returns queries and keys of no token as they are")


def _rotate_nothing(kind: Any) -> None:
    """torch cannot tell the shape of no number that is viewed as (0, -1, width); CUDA's kernel is not asked."""
    rotate = kind.forward_native

    def forward_native(self: Any, positions: Tensor, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        return rotate(self, positions, query, key, *args, **kwargs) if positions.numel() else (query, key)

    kind.forward_native = forward_native


def all_agree(scheduler: Any, mine: bool) -> bool:
    """Whether all ranks say yes. Each asks at the same iteration: they meet in each of SGLang's, too."""
    flag = torch.tensor([int(mine)])
    with blame.own_code(inside=False):
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=scheduler.tp_cpu_group)
    return bool(flag)


def own_rows(chosen: Tensor) -> Tensor:
    """Of something with a row for each token that all ranks gathered, the rows of this rank."""
    from sglang.srt.layers import dp_attention

    counts, slot = dp_attention.get_dp_global_num_tokens(), torch.distributed.get_rank()
    if not counts or len(chosen) != sum(counts):
        return chosen
    begin = sum(counts[:slot])
    return chosen[begin : begin + counts[slot]]
