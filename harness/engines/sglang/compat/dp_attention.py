"""DP attention: how SGLang is started with it, what a CPU lacks for it, and what a rank knows of the tokens of all."""

import inspect
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
from torch import Tensor

from eagletwin.harness.engines.inside import blame
from eagletwin.harness.engines.inside.blame import NotDriven

from ..graphs import tape


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


def refuse() -> None:
    """Raises NotDriven where this release gathers the counts of all ranks in memory that only a GPU's host has."""
    from sglang.srt.model_executor import forward_batch_info

    if not hasattr(forward_batch_info, "_is_cpu"):
        raise NotDriven("DP attention: this release pins memory for it on a CPU as well (0.5.20 and later do not)")


def run_on_cpu(shims: list[str]) -> None:
    """Idle batches, which have no request and no token, on a CPU."""
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.rotary_embedding import base
    from sglang.srt.model_executor import model_runner

    # forward_batch_info.py asks a backend of a CPU for it by this name
    TritonAttnBackend.get_cpu_graph_seq_len_fill_value = TritonAttnBackend.get_cuda_graph_seq_len_fill_value
    shims.append("TritonAttnBackend.get_cpu_graph_seq_len_fill_value: as on a GPU")
    dp_attention.memcpy_func = dp_attention.memcpy_triton  # what a CPU has reads counts on the host
    shims.append("dp_attention.memcpy_func: the Triton kernel")
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


def meet_in_graphs(shims: list[str]) -> None:
    """Collectives that SGLang has NCCL run while a graph is captured: gloo's, each of them one node of the graph."""
    from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator

    def all_reduce(self: Any, tensor: Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> None:
        torch.distributed.all_reduce(tensor, op, self.group)

    def outplace_all_reduce(self: Any, tensor: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        result = tensor.clone()
        torch.distributed.all_reduce(result, group=self.group)
        return result

    def all_gather(self: Any, output: Tensor, tensor: Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.distributed.all_gather_into_tensor(output, tensor, self.group)

    def reduce_scatter(self: Any, output: Tensor, tensor: Tensor, *_args: Any, **_kwargs: Any) -> None:
        output.copy_(outplace_all_reduce(self, tensor).tensor_split(self.world_size)[self.rank])

    for method in (all_reduce, outplace_all_reduce, all_gather, reduce_scatter):
        setattr(PyNcclCommunicator, method.__name__, tape.opaque(method))
    shims.append("PyNcclCommunicator: gloo's collectives")


def all_agree(scheduler: Any, mine: bool) -> bool:
    """Whether all ranks say yes. Each asks at the same iteration: they meet in each of SGLang's, too."""
    flag = torch.tensor([int(mine)])
    with blame.own_code(inside=False):
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=scheduler.tp_cpu_group)
    return bool(flag)


def own_rows(chosen: Tensor) -> Tensor:
    """Of something with a row for each token that all ranks gathered, the rows of this rank."""
    from sglang.srt.layers import dp_attention

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    counts = dp_attention.get_dp_global_num_tokens() if ranks > 1 else None
    if not counts or len(chosen) != sum(counts):
        return chosen
    begin = sum(counts[:rank])
    return chosen[begin : begin + counts[rank]]


def own_rows_in_graph(chosen: Tensor) -> Tensor:
    """The same in a graph, in which all ranks have as many rows."""
    ranks = torch.distributed.get_world_size()
    return chosen.tensor_split(ranks)[torch.distributed.get_rank()] if ranks > 1 else chosen
