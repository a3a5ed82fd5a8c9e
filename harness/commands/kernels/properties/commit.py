"""What follows a verified path: bonus tokens, lengths, compaction, and the inputs and layout of draft extend."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.reference.tree import accept_row, bonus_token, last_row, move_to_front, tracked_place

from ..release import EAGLE, WORKER, load
from ..tier import fault, holds_for, same, true
from ..trees import Batch, batches


@dataclass(frozen=True)
class Verified:
    """A batch whose accepted paths lead to any node, and what the target chose at each node."""

    batch: Batch
    strided: bool = False  # inputs are views with gaps

    @property
    def argmax(self) -> Tensor:
        """[bs, nodes] int32, all different."""
        return torch.arange(len(self.batch.trees) * self.batch.nodes, dtype=torch.int32).reshape(-1, self.batch.nodes) + 500

    @property
    def width(self) -> int:
        return self.batch.num_steps + 1

    @property
    def accepts(self) -> Tensor:
        """SGLang's accept_index [bs, num_steps + 1] int32."""
        rows = [accept_row(path, first * self.batch.nodes, self.width) for first, path in enumerate(self.batch.paths)]
        return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), self.width)

    @property
    def accept_lens(self) -> Tensor:
        """[bs] int32, as SGLang's."""
        return torch.tensor([len(path) for path in self.batch.paths], dtype=torch.int32)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor(self.batch.lengths, dtype=torch.int64)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The tensor, or a view of every second element of one twice as wide; what lies between is poison."""
        return torch.stack([tensor, torch.full_like(tensor, 2**30)], -1)[..., 0] if self.strided else tensor


def verified_batches(chain: bool = False) -> st.SearchStrategy[Verified]:
    return st.builds(Verified, batches(chain=chain), st.booleans())


@holds_for(
    verified_batches(),
    fault(f"{EAGLE}.fill_bonus_tokens", "accept_len - 1", "accept_len"),
    fault(f"{EAGLE}.fill_bonus_tokens_func", "[(batch_size,)]", "[(batch_size - 1,)]"),
)
def bonus_is_filled(case: Verified) -> None:
    count, argmax = len(case.batch.paths), case.argmax
    bonus = torch.full((count + 1,), -77, dtype=torch.int32)
    tokens = argmax.flatten()[case.accepts]  # -1 picks the last: what follows a path may be anything
    load(EAGLE).fill_bonus_tokens_func(tokens, case.accept_lens, bonus[:count], case.width, count)
    expected = [bonus_token(row, path) for row, path in zip(argmax.tolist(), case.batch.paths, strict=True)]
    same("bonus tokens", bonus, [*expected, -77])


COMMIT, EXTEND = f"{EAGLE}._verify_commit_outputs_kernel", f"{EAGLE}._prepare_draft_extend_lengths_kernel"


@holds_for(
    verified_batches(),
    fault(COMMIT, "tl.store(new_seq_lens + row, length + accepted, valid)", "pass"),
    fault(f"{EAGLE}.prepare_verify_commit_outputs", "seq_lens.stride(0)", "1"),
)
def verify_is_committed(case: Verified) -> None:
    """The fused form for trees: lengths and bonus tokens."""
    predict = case.laid_out(case.argmax.flatten())
    inputs = (predict, case.laid_out(case.accepts), case.laid_out(case.accept_lens), case.laid_out(case.lengths))
    lengths, bonus = load(EAGLE).prepare_verify_commit_outputs(*inputs)
    check_commit(case, lengths, bonus)


def check_commit(case: Verified, lengths: Tensor, bonus: Tensor) -> None:
    same("new lengths", lengths, [m + len(path) for m, path in zip(case.batch.lengths, case.batch.paths, strict=True)])
    same(
        "bonus tokens",
        bonus.tolist(),
        [bonus_token(row, path) for row, path in zip(case.argmax.tolist(), case.batch.paths, strict=True)],
    )
    same("dtypes of lengths and bonus tokens", (lengths.dtype, bonus.dtype), (torch.int64, torch.int32))


@dataclass(frozen=True)
class Tracked:
    verified: Verified
    interval: int


@holds_for(
    st.builds(Tracked, verified_batches(chain=True), st.sampled_from([0, 0, 1, 2, 3, 8])),
    fault(COMMIT, "post // TRACK_INTERVAL * TRACK_INTERVAL - length - 1", "accepted - 1"),
    fault(COMMIT, "row * DRAFT_WIDTH + accepted - 1", "row * DRAFT_WIDTH + accepted"),
)
def chain_verify_is_committed(case: Tracked) -> None:
    """The fused form for chains: draft extend's inputs and, for recurrent models, which steps' states are kept, as well."""
    of, nodes = case.verified, case.verified.batch.nodes
    predict = of.laid_out(of.argmax.flatten())
    inputs = (predict, of.laid_out(of.accepts), of.laid_out(of.accept_lens), of.laid_out(of.lengths))
    lengths, bonus, steps, extend = load(EAGLE).prepare_verify_commit_outputs(*inputs, nodes, case.interval)
    check_commit(of, lengths, bonus)
    extend_inputs(of, *extend)
    check_tracked_nodes(case, *steps)


def check_tracked_nodes(case: Tracked, last: Tensor, tracked: Tensor | None) -> None:
    """The last accepted node, and the one that reaches a multiple of the interval; -1: none does."""
    of = case.verified
    same("last accepted nodes", last, [path[-1] for path in of.batch.paths])
    if tracked is None or not case.interval:
        true("no tracked nodes are returned", tracked is None and not case.interval)
        return
    places = [tracked_place(m, len(path), case.interval) for m, path in zip(of.batch.lengths, of.batch.paths, strict=True)]
    expected = [-1 if at is None else path[at] for at, path in zip(places, of.batch.paths, strict=True)]
    same("tracked nodes", tracked, expected)


def extend_inputs(case: Verified, correct: Tensor, select: Tensor, ids: Tensor) -> None:
    nodes = case.batch.nodes
    same("accepted drafts", correct, [len(path) - 1 for path in case.batch.paths])
    same("select_index", select, [last_row(request, len(path), nodes) for request, path in enumerate(case.batch.paths)])
    same("dtype and input ids", (ids.dtype, ids.tolist()), (torch.int64, case.argmax.flatten().tolist()))


@holds_for(
    verified_batches(),
    fault(f"{EAGLE}._draft_extend_inputs_kernel", "offset * WIDTH + accepted - 1", "accepted - 1"),
    fault(f"{EAGLE}.prepare_draft_extend_inputs", "predict.stride(0)", "1"),
)
def draft_extend_gets_its_inputs(case: Verified) -> None:
    lens, predict = case.laid_out(case.accept_lens), case.laid_out(case.argmax.flatten())
    extend_inputs(case, *load(EAGLE).prepare_draft_extend_inputs(lens, predict, case.batch.nodes))


@dataclass(frozen=True)
class Window:
    """Draft extend runs over `width` rows a request from its committed length on, `front` of them before it."""

    lengths: tuple[int, ...]
    width: int
    front: int
    mrope: bool
    strided: bool


def lengths_of(case: Window) -> Tensor:
    lengths = torch.tensor(case.lengths, dtype=torch.int64)
    return torch.stack([lengths, lengths + 10**6], 1)[:, 0] if case.strided else lengths


WINDOWS = {"lengths": st.lists(st.integers(0, 9), max_size=4).map(tuple), "width": st.integers(1, 6)}


@holds_for(
    st.builds(Window, **WINDOWS, front=st.integers(0, 3), mrope=st.just(False), strided=st.booleans()),
    fault(EXTEND, "tl.maximum(base - FRONT, 0)", "base - FRONT"),
    fault(f"{EAGLE}.prepare_draft_extend_lengths", "front_offset,\n            BLOCK", "0,\n    BLOCK"),
)
def draft_extend_gets_its_lengths(case: Window) -> None:
    prefix, extend, after = load(EAGLE).prepare_draft_extend_lengths(lengths_of(case), case.width, case.front)
    same("prefix lengths", prefix, [max(m - case.front, 0) for m in case.lengths])
    same("extend lengths", extend, [case.width + case.front] * len(case.lengths))
    same("lengths after it", after, [m + case.width for m in case.lengths])


@holds_for(
    st.builds(Window, **WINDOWS, front=st.just(0), mrope=st.booleans(), strided=st.booleans()),
    fault(EXTEND, "(row % WIDTH)", "(row % (WIDTH + 1))"),
    fault(f"{EAGLE}.prepare_draft_extend_layout", "mrope=mrope,", "mrope=positions,"),
)
def draft_extend_gets_its_layout(case: Window) -> None:
    found = load(EAGLE).prepare_draft_extend_layout(lengths_of(case), case.width, case.mrope)
    prefix, extend, after, (positions, starts, mrope) = found
    expected = [m + row for m in case.lengths for row in range(case.width)]
    same("prefix lengths", prefix, list(case.lengths))
    same("extend lengths", extend, [case.width] * len(case.lengths))
    same("lengths after it", after, [m + case.width for m in case.lengths])
    same("positions", positions, expected)
    same("starts of requests", starts, [request * case.width for request in range(len(case.lengths))])
    same("there are mrope positions", mrope is not None, case.mrope)
    if mrope is not None:
        same("mrope positions", mrope, [expected] * 3)


@holds_for(
    verified_batches().filter(lambda case: case.batch.nodes >= case.width),
    fault(f"{WORKER}._compact_accept_to_front", "x[safe]", "x[safe * 0]"),
)
def rows_come_to_the_front(case: Verified) -> None:
    """Of the accepted path; rows after it are garbage, and beyond the longest path of all untouched."""
    count, nodes, width = len(case.batch.paths), case.batch.nodes, case.width
    hidden = torch.arange(count * nodes * 3.0).reshape(count * nodes, 3)
    for rows in (hidden, case.argmax.flatten()):
        found = load(WORKER)._compact_accept_to_front(rows, case.accepts, count, num_draft_tokens=nodes)
        same("shape", found.shape, rows.shape)
        blocks = zip(torch.split(rows, nodes), torch.split(found, nodes), case.batch.paths, strict=True)
        for before, after, path in blocks if count else ():
            expected = move_to_front(before, path)
            same("rows of the path", after[: len(path)], expected[: len(path)])
            same("rows behind the longest path", after[width:], before[width:])
