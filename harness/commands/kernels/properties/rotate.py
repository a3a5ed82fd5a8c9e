"""The rotation of input ids in multi-layer EAGLE: each layer consumes, row by row, the token after the layer below's."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from eagletwin.reference.tree import rotate_ids

from ..release import ROTATE, load
from ..tier import fault, holds_for, same, true


@dataclass(frozen=True)
class Rotation:
    """`selected`: the new token goes to a place of the request's that is named; None: to its last row."""

    lengths: tuple[int, ...]
    selected: tuple[int, ...] | None


@st.composite
def rotations(draw: st.DrawFn) -> Rotation:
    """Also requests longer than the 8 ids which the kernel takes at a time."""
    lengths = draw(st.lists(st.integers(0, 20), max_size=4))
    if not draw(st.booleans()):
        return Rotation(tuple(lengths), None)
    return Rotation(tuple(lengths), tuple(draw(st.integers(0, max(length - 1, 0))) for length in lengths))


KERNEL = f"{ROTATE}.rotate_input_ids_kernel"


@holds_for(
    rotations(),
    fault(KERNEL, "+ offsets + 1", "+ offsets"),
    fault(KERNEL, "start_loc + seq_len - 1\n", "start_loc + seq_len - 2\n"),
    fault(f"{ROTATE}.rotate_input_ids", "grid = (batch_size,)", "grid = (1,)"),
)
def ids_rotate(case: Rotation) -> None:
    """A request of no rows stays as it is, and so does what lies between requests."""
    starts = [1 + sum(case.lengths[:row]) + row for row in range(len(case.lengths))]
    total = 2 + sum(case.lengths) + len(case.lengths)
    ids, tokens = torch.arange(total) + 100, torch.arange(len(starts))
    expected = ids.tolist()
    for row, (start, length) in enumerate(zip(starts, case.lengths, strict=True)):
        if case.selected is None:
            expected[start : start + length] = rotate_ids(expected[start : start + length], row)
        elif length:
            last = expected[start + length - 1]  # the row that nothing is shifted into
            expected[start : start + length] = rotate_ids(expected[start : start + length], last)
            expected[start + case.selected[row]] = row
    select = (
        None if case.selected is None else torch.tensor([s + at for s, at in zip(starts, case.selected, strict=True)]).long()
    )
    found = load(ROTATE).rotate_input_ids(
        ids, torch.tensor(starts).long(), torch.tensor(case.lengths).long(), tokens[:, None], select
    )
    same("input ids", found, expected)
    true("the ids are rotated in place", found is ids)
