"""Which slots each branch of each draft step reads, as the attention backends are given them."""

import inspect
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.reference.layout import draft_reads, physical_slot

from ..release import LOCS, load
from ..tier import fault, holds_for, same
from .cache_locs import UNWRITTEN, Requests, requests


def power(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


@dataclass(frozen=True)
class Reads:
    requests: Requests
    topk: int
    num_steps: int
    page_size: int
    recent: int = 0  # the draft's window; 0: it sees all
    sink: int = 0
    split: int = 0  # launches with so many programs for the prefix of one branch; 0: the form without
    paged: bool = False  # the table has a page's number in each column of it
    translated: bool = False
    of_both: bool = False  # the window is of prefix and branch together

    @property
    def branches(self) -> list[tuple[int, int]]:
        """(request, branch) in the order in which their slots follow each other."""
        return [(request, branch) for request in range(len(self.requests.lengths)) for branch in range(self.topk)]


def table_of(case: Reads) -> tuple[Tensor, int, list[int] | None]:
    """(what kernels read, entries' page size, pages' physical places)"""
    pages = [(page * 5) % 13 - 1 for page in range(8 * 120)] if case.translated else None
    table = case.requests.table
    if case.paged and case.page_size > 1:
        return table[:, : 120 // case.page_size].contiguous(), case.page_size, pages
    return table, 1, pages


def expected_indices(case: Reads, columns: list[list[int]]) -> tuple[list[int], list[int]]:
    """(slots of these columns of each branch, one branch behind the other; where each branch's begin, and the end)"""
    table, entries, pages = table_of(case)
    rows = table.tolist()
    slots: list[int] = []
    for (request, _), read in zip(case.branches, columns, strict=True):
        row = rows[case.requests.rows[request]]
        virtual = [row[column // entries] * entries + column % entries for column in read]
        slots += virtual if pages is None else [physical_slot(slot, pages, case.page_size) for slot in virtual]
    return slots, list(accumulate(map(len, columns), initial=0))


def check_reads(case: Reads, name: str, programs: int, more: tuple[int, ...], options: dict[str, Any]) -> None:
    """Launch a kernel that says which slots each branch of each step reads, and compare them with the reference.

    programs: of each branch. more, options: what the kernel takes besides. Raises TypeError for an option that it lacks:
    the CPU's launch would drop it without a word.
    """
    rows, lengths = case.requests.tensors
    table, entries, pages = table_of(case)
    branches, count = case.branches, len(rows)
    indices = torch.full((case.num_steps, 3 * 4 * 50 + 8), UNWRITTEN)
    ends = torch.full((case.num_steps, len(branches) + 3), UNWRITTEN, dtype=torch.int32)
    ends[:, 0] = 0  # SGLang's buffer is zero there, and stays so
    options = {"ENTRY_PAGE_SIZE": entries, **options}
    if pages is not None:
        options |= {"v2p": torch.tensor(pages), "TRANSLATE": True}
    kernel = getattr(load(LOCS), name)
    unknown = sorted(options.keys() - inspect.signature(kernel.fn).parameters.keys())
    if unknown:
        raise TypeError(f"{name} takes no {', '.join(unknown)}")
    kernel[(programs, count, case.topk)](
        *(rows, table, lengths, indices, ends, lengths.repeat_interleave(case.topk), table.shape[1]),
        *(indices.shape[1], ends.shape[1], power(count), power(case.num_steps), power(len(branches))),
        *more,
        **options,
    )
    for step in range(1, case.num_steps + 1):
        slots, bounds = expected_indices(case, [columns_read(case, step, *of) for of in branches])
        same(f"slots that step {step} reads", indices[step - 1], slots + [UNWRITTEN] * (indices.shape[1] - len(slots)))
        same(f"bounds of branches at step {step}", ends[step - 1], [*bounds, UNWRITTEN, UNWRITTEN])


def columns_read(case: Reads, step: int, request: int, branch: int) -> list[int]:
    recent, sink = (0, 0) if case.of_both else (case.recent, case.sink)
    length = case.requests.lengths[request]
    read = draft_reads(length, branch, step, case.topk, case.num_steps, case.page_size, recent, sink).tolist()
    return read[-case.recent :] if case.of_both else read


KERNEL, WINDOW = f"{LOCS}.generate_draft_decode_kv_indices", f"{LOCS}.generate_draft_decode_window_kv_indices"
SHAPES = {"topk": st.integers(1, 4), "num_steps": st.integers(1, 4), "page_size": st.sampled_from([1, 2, 4])}


@holds_for(
    st.builds(
        Reads,
        requests(least=1),
        **SHAPES,
        recent=st.sampled_from([0, 0, 1, 5, 50]),
        sink=st.integers(0, 2),
        split=st.integers(0, 2),
        paged=st.booleans(),
        translated=st.booleans(),
    ),
    fault(KERNEL, "seq_len + topk_id * num_steps + tl", "seq_len + topk_id + tl"),
    fault(KERNEL, "base + zid * iters", "base + zid"),
    fault(KERNEL, "+ num_steps + page_size - 1", "+ num_steps - 1"),
)
def steps_read_prefix_and_branch(case: Reads) -> None:
    programs, options = case.num_steps * max(case.split, 1), {"NUM_STEPS": case.num_steps if case.split else 0}
    more = (case.page_size, case.recent, case.sink)
    check_reads(case, "generate_draft_decode_kv_indices", programs, more, options)


@holds_for(
    st.builds(
        Reads,
        requests(least=1),
        **SHAPES,
        recent=st.sampled_from([1, 2, 5, 50]),
        paged=st.booleans(),
        translated=st.booleans(),
        of_both=st.just(True),
    ),
    fault(WINDOW, "tl.maximum(start - seq_len, 0)", "start * 0"),
    fault(WINDOW, "start = total - window_len", "start = total - window_len + 1"),
)
def windows_read_the_last_of_both(case: Reads) -> None:
    """The rail of sliding-window layers: of prefix and branch together the last `recent` slots."""
    check_reads(case, "generate_draft_decode_window_kv_indices", case.num_steps, (case.page_size, case.recent), {})
