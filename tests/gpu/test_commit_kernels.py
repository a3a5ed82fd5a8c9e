"""The move of an accepted path's KV rows, compiled: what a tree's verify launches on a GPU after it has accepted.

The kernel loads and stores in one program and has no barrier between, while a path's row may be the next one's source. The
CPU runtime cannot see such a race; here the move is repeated under load, each row the target of one and the source of another.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from eagletwin.harness.commands.kernels.properties.kv_move import SLOTS, AcceptedBatch
from eagletwin.harness.commands.kernels.release import MOVE, SPEC
from eagletwin.harness.commands.kernels.trees import Batch, batches
from eagletwin.reference.tree import accept_row, moved

from .test_kernels import check, load, on_the_gpu  # noqa: F401  the fixture is for every test of a module that has it

LAUNCHES = 1000


class Pool:
    """rows [layers, slots, width] bytes, moved by the kernel as MHATokenToKVPool has it move its own."""

    def __init__(self, slots: int, width: int, layers: int) -> None:
        self.rows = torch.randint(0, 256, (layers, slots, width), dtype=torch.uint8)
        self.pointers = torch.tensor([layer.data_ptr() for layer in self.rows], dtype=torch.uint64)
        self.strides = torch.tensor([width] * layers)
        tile = tile_of(width)
        self.sizes = {"bytes_per_tile": tile, "byte_tiles": -(-width // tile), "num_warps": 4 if tile <= 256 else 8}

    def move_kv_cache(self, targets: Tensor, sources: Tensor) -> None:
        count = len(targets)
        upper = 1 << (count - 1).bit_length()
        arguments = (self.pointers, self.strides, targets, sources, count, upper, self.sizes)
        load(MOVE).copy_all_layer_kv_cache_func(*arguments)


def tile_of(width: int) -> int:
    """Bytes that a program moves of each row: MHATokenToKVPool's choice."""
    return 512 if width >= 8192 else 256 if width >= 4096 else 128


def path_comes_to_the_front(batch: Batch) -> None:
    """From accept_index to the pool: the slots behind the prefix, those accepted, then the move."""
    case, nodes, width = AcceptedBatch(batch), batch.nodes, batch.num_steps + 1
    pool = Pool(SLOTS, 96, 2)
    before = pool.rows.clone()
    table = torch.zeros(8, SLOTS, dtype=torch.int32)
    for row, (length, slots) in enumerate(zip(batch.lengths, case.slots, strict=True)):
        table[row, length : length + nodes] = torch.tensor(slots, dtype=torch.int32)
    accepted = [accept_row(path, first * nodes, width) for first, path in enumerate(case.paths)]
    load(SPEC).move_accept_tokens_to_target_kvcache(
        SimpleNamespace(
            seq_lens=torch.tensor(batch.lengths, dtype=torch.int64),
            req_pool_indices=torch.arange(len(accepted)),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            out_cache_loc=torch.tensor(case.slots, dtype=torch.int64).flatten(),
        ),
        torch.tensor(accepted, dtype=torch.int32),
        torch.tensor([len(path) - 1 for path in case.paths], dtype=torch.int32),
        SimpleNamespace(get_kvcache=lambda: pool),
    )
    for old, new in zip(before, pool.rows, strict=True):
        assert torch.equal(new, moved(old, case.moves))


def test_an_accepted_path_comes_to_the_front() -> None:
    check(path_comes_to_the_front, batches(least=1))


@pytest.mark.parametrize(("width", "count"), [(128, 8), (128, 64), (128, 256), (1024, 64), (1024, 256), (8192, 8), (8192, 128)])
def test_rows_that_are_read_and_written_in_one_launch(width: int, count: int) -> None:
    """Every row is overwritten by the one behind it, as on a path of all nodes but the second, in 64 layers."""
    pool = Pool(count + 1, width, 64)
    fresh, wrong = pool.rows.clone(), torch.zeros((), dtype=torch.int64)
    expected = torch.cat([fresh[:, 1:], fresh[:, -1:]], 1)
    sources, targets = torch.arange(1, count + 1), torch.arange(count)
    for _ in range(LAUNCHES):
        pool.rows.copy_(fresh)
        pool.move_kv_cache(targets, sources)
        wrong += (pool.rows != expected).flatten(1).any(1).sum()
    assert int(wrong) == 0, f"{int(wrong)} of {LAUNCHES * 64} layers were not moved as if at once"
