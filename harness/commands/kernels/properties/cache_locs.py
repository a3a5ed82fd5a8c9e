"""Which slots each stage writes: of draft decode by branch and step, with and without pages; of verify and draft extend."""

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.reference.layout import draft_columns, hole_columns, physical_slot, verify_columns

from ..release import LOCS, UTILS, WORKER, load
from ..tier import fault, holds_for, same

COLUMNS, UNWRITTEN = 120, -77


@dataclass(frozen=True)
class Requests:
    """Committed lengths of a batch's requests, and the rows of req_to_token that they have."""

    lengths: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def table(self) -> Tensor:
        """req_to_token [8, COLUMNS] int32: every entry is another slot, and neighbours are far apart."""
        return (torch.arange(8 * COLUMNS) * 7 % (8 * COLUMNS)).reshape(8, COLUMNS).int()

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """(req_pool_indices, seq_lens) int64."""
        return torch.tensor(self.rows, dtype=torch.int64), torch.tensor(self.lengths, dtype=torch.int64)

    def slots(self, columns: list[Tensor]) -> list[list[Any]]:
        """[bs] what these columns of each request hold, in the columns' shape."""
        return [self.table[row, of].tolist() for row, of in zip(self.rows, columns, strict=True)]


def flat(nested: list[Any]) -> list[Any]:
    return [leaf for item in nested for leaf in (flat(item) if isinstance(item, list) else [item])]


@st.composite
def requests(draw: st.DrawFn, least: int = 0, most: int = 3) -> Requests:
    lengths = draw(st.lists(st.integers(0, 40), min_size=least, max_size=most))
    start = draw(st.integers(0, 7))
    return Requests(tuple(lengths), tuple((start + 3 * i) % 8 for i in range(len(lengths))))


@dataclass(frozen=True)
class Draft:
    requests: Requests
    topk: int
    num_steps: int
    page_size: int = 1

    @property
    def columns(self) -> list[Tensor]:
        """[bs] of [num_steps, topk]"""
        return [draft_columns(m, self.topk, self.num_steps, self.page_size) for m in self.requests.lengths]


DRAFTS = {"topk": st.integers(1, 4), "num_steps": st.integers(1, 5)}
CONTIGUOUS, RAGGED, UNIFORM = (
    f"{LOCS}.{name}"
    for name in ("assign_draft_cache_locs_contiguous", "assign_extend_cache_locs", "assign_extend_cache_locs_uniform")
)


@holds_for(
    st.builds(Draft, requests(), **DRAFTS),
    fault(CONTIGUOUS, "token_pool + kv_start + copy_offset", "token_pool + kv_start + 1 + copy_offset"),
    fault(CONTIGUOUS, "axis * BS * topk", "axis * topk"),
    fault(f"{LOCS}.assign_draft_cache_locs_contiguous_func", "BS=bs,", "BS=1,"),
)
def draft_slots_are_contiguous(case: Draft) -> None:
    """Also the positions which the GPU's path has written in the same launch."""
    rows, lengths = case.requests.tensors
    count, width = len(lengths), case.topk * case.num_steps
    out = torch.full((count * width + 2,), UNWRITTEN)
    positions, mrope = torch.full((count * case.topk + 1,), UNWRITTEN), torch.full((3, count * case.topk), UNWRITTEN)
    for written in (False, True):
        extra = {"positions": positions, "mrope": mrope} if written else {}
        load(LOCS).assign_draft_cache_locs_contiguous_func(
            *(rows, case.requests.table, lengths, out, case.topk, case.num_steps), **extra
        )
        by_branch = case.requests.slots([columns.t() for columns in case.columns])
        same("slots", out, [*flat(by_branch), UNWRITTEN, UNWRITTEN])
        out.fill_(UNWRITTEN)
    expected = [m for m in case.requests.lengths for _ in range(case.topk)]
    same("positions", positions, [*expected, UNWRITTEN])
    same("mrope positions", mrope, [expected] * 3)


class Assigned(Exception):
    """prepare_for_draft is done with slots."""


class Stop:
    """Stands in for the draft input, to which prepare_for_draft turns next."""

    def __setattr__(self, name: str, value: object) -> None:
        raise Assigned


def assign(case: Draft) -> tuple[Tensor, list[tuple[int, int]]]:
    """(out_cache_loc, moves of KV rows) of the worker's own preparation of draft decode."""
    moves: list[tuple[int, int]] = []
    arguments = draft_arguments(case, moves)
    with contextlib.suppress(Assigned):
        load(WORKER).prepare_for_draft(*arguments)
        raise AssertionError("prepare_for_draft assigned no slots")
    return arguments[2].out_cache_loc, moves


def draft_arguments(case: Draft, moves: list[tuple[int, int]]) -> tuple[Any, ...]:
    """Arguments of prepare_for_draft; `moves` takes the moves that it asks the KV pool for."""

    def move(targets: Tensor, sources: Tensor) -> None:
        moves.extend(zip(sources.tolist(), targets.tolist(), strict=True))

    rows, lengths = case.requests.tensors
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=lengths,
        req_pool_indices=rows,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=case.page_size),
        device="cpu",
    )
    runner = SimpleNamespace(token_to_kv_pool=SimpleNamespace(move_kv_cache=move))
    pool = SimpleNamespace(req_to_token=case.requests.table)
    return Stop(), pool, batch, None, runner, case.topk, case.num_steps


TAIL = f"{WORKER}.duplicate_prefix_tail_to_draft_branches"


@holds_for(
    st.builds(Draft, requests(least=1), **DRAFTS, page_size=st.sampled_from([1, 2, 4, 8])),
    fault(f"{WORKER}.prepare_for_draft", "(last_page + num_steps + page_size - 1)", "(last_page + num_steps)"),
    fault(TAIL, "< last_page.view(bs, 1, 1)", "<= last_page.view(bs, 1, 1)"),
    fault(TAIL, "token_to_kv_pool.move_kv_cache(tgt_slots, src_slots)", "pass"),
)
def draft_slots_keep_to_their_pages(case: Draft) -> None:
    """And the holes of every branch get a copy of the prefix's partial page."""
    out, moves = assign(case)
    same("out_cache_loc", out, flat(case.requests.slots([columns.t() for columns in case.columns])))
    holes = [hole_columns(m, case.topk, case.num_steps, case.page_size) for m in case.requests.lengths]
    sources = [
        m - of.shape[1] + torch.arange(of.shape[1]).expand(of.shape) for m, of in zip(case.requests.lengths, holes, strict=True)
    ]
    expected = zip(flat(case.requests.slots(sources)), flat(case.requests.slots(holes)), strict=True)
    same("moves of KV rows (from, to)", moves, list(expected))


@holds_for(
    st.builds(Draft, requests(least=1), **DRAFTS, page_size=st.sampled_from([1, 4])),
    fault(f"{UTILS}.per_step_draft_out_cache_loc", "permute(2, 0, 1)", "permute(2, 1, 0)"),
)
def each_step_writes_its_column(case: Draft) -> None:
    """PR #26239: step j of all branches of all requests, in that order."""
    out, _ = assign(case)
    found = load(UTILS).per_step_draft_out_cache_loc(out, len(case.requests.lengths), case.topk, case.num_steps)
    by_step = [case.requests.slots([columns[step] for columns in case.columns]) for step in range(case.num_steps)]
    same("slots of each step", found, [flat(step) for step in by_step])


@dataclass(frozen=True)
class Extend:
    requests: Requests
    counts: tuple[int, ...]  # rows of each request
    width: int  # the most that a request may have


@st.composite
def extends(draw: st.DrawFn) -> Extend:
    of, width = draw(requests()), draw(st.integers(1, 70))  # the kernels take 32 and 64 slots at a time
    return Extend(of, tuple(draw(st.integers(0, width)) for _ in of.lengths), width)


@holds_for(
    extends(),
    fault(RAGGED, "save_offset += BLOCK_SIZE", "save_offset += 0"),
    fault(RAGGED, "tl.sum(end - start, axis=0)", "tl.sum(start - start, axis=0)"),
    fault(f"{LOCS}.assign_extend_cache_locs_func", "next_power_of_2(batch_size)", "1"),
)
def extend_slots_follow_the_prefix(case: Extend) -> None:
    """Any number of rows a request, one request's behind the other's; SGLang allocates for the most, and leaves the rest."""
    rows, lengths = case.requests.tensors
    found = load(LOCS).assign_extend_cache_locs_func(
        req_pool_indices=rows,
        req_to_token=case.requests.table,
        start_offset=lengths,
        end_offset=lengths + torch.tensor(case.counts, dtype=torch.int64),
        batch_size=len(rows),
        draft_token_num=case.width,
        device="cpu",
    )
    expected = flat(case.requests.slots([verify_columns(*of) for of in zip(case.requests.lengths, case.counts, strict=True)]))
    same("length of out_cache_loc", len(found), len(rows) * case.width)
    unwritten = torch.empty(1, dtype=torch.int64).item()  # poison, in this tier
    same("out_cache_loc", found, expected + [unwritten] * (len(found) - len(expected)))


@dataclass(frozen=True)
class Uniform:
    """translate: 0 not at all, 1 to the slots of one pool, 2 also to those of the sliding window's pool."""

    requests: Requests
    width: int
    page_size: int
    translate: int
    known: int  # pages in the tables; the slots of further pages have no owner
    extras: bool


@holds_for(
    st.builds(
        Uniform,
        requests(),
        st.integers(1, 70),
        st.sampled_from([1, 4]),
        st.integers(0, 2),
        st.integers(1, 960),
        st.booleans(),
    ),
    fault(UNIFORM, "o = offs + i * BLOCK_SIZE", "o = offs"),
    fault(UNIFORM, "swa_v2p + tl.where(swa_valid", "full_v2p + tl.where(swa_valid"),
    fault(f"{LOCS}.assign_extend_cache_locs_uniform_func", "swa_v2p.numel()", "0"),
)
def verify_slots_follow_the_prefix(case: Uniform) -> None:
    """num_draft_tokens rows a request; with positions, an anchor and physical slots, which the GPU's path has written along."""
    rows, lengths = case.requests.tensors
    count, total = len(rows), len(rows) * case.width
    pages = [(torch.arange(case.known) * factor % 11 - 1).int() for factor in (5, 3)]  # -1: a page without memory
    outs = [torch.full((total,), UNWRITTEN) for _ in pages]
    positions, anchor = torch.full((count, case.width), UNWRITTEN), torch.full((count, 3), UNWRITTEN)
    extra: dict[str, Any] = {}
    if case.translate:
        extra |= {"full_v2p": pages[0], "full_out": outs[0], "page_size": case.page_size}
    if case.translate == 2:
        extra |= {"swa_v2p": pages[1], "swa_out": outs[1]}
    if case.extras:
        extra |= {"positions_out": positions, "anchor_src": torch.arange(count) + 900, "anchor_out": anchor}
    found = load(LOCS).assign_extend_cache_locs_uniform_func(
        rows, case.requests.table, lengths, count, case.width, "cpu", **extra
    )
    columns = [verify_columns(m, case.width) for m in case.requests.lengths]
    slots = flat(case.requests.slots(columns))
    same("out_cache_loc", found, slots)
    for kind, (out, table) in enumerate(zip(outs, pages, strict=True), 1):
        written = [physical_slot(slot, table.tolist(), case.page_size) for slot in slots]
        same("physical slots", out, written if kind <= case.translate else [UNWRITTEN] * total)
    same("positions", positions, [of.tolist() for of in columns] if case.extras else [[UNWRITTEN] * case.width] * count)
    same("anchor", anchor, [[900 + row if case.extras else UNWRITTEN, UNWRITTEN, UNWRITTEN] for row in range(count)])
