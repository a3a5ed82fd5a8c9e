"""deterministic-window's candidate fix: the mask that it copies has the columns of the window, for each request of a batch."""

from types import SimpleNamespace

import pytest
import torch

from eagletwin.cases.ledger.deterministic_window import _MASK_OF_WINDOW

# Of each request: the tokens that are verified, those before the window, and those in it before the first of these.
BATCHES = {
    "chains": ((3, 0, 2), (3, 5, 4), (3, 1, 4)),
    "one": ((4, 7, 3),),
    "of several widths": ((2, 3, 4), (5, 0, 0), (1, 9, 4), (3, 2, 4)),
    "of which no window begins behind 0": ((3, 0, 1), (3, 0, 3)),
    "padded": ((2, 4, 4), (2, 0, 1), (2, 0, 1)),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("more", [0, 50], ids=["as long as it is", "in a graph's buffer"])
def test_each_request_keeps_the_columns_of_its_window(batch: tuple[tuple[int, int, int], ...], more: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    masks = [torch.rand(width, first + rest + width, generator=drawn) < 0.5 for width, first, rest in batch]
    sizes = torch.tensor([0, *(mask.numel() for mask in masks)])
    whole = torch.cat([*(mask.flatten() for mask in masks), torch.ones(more, dtype=torch.bool)])
    widths, firsts, rests = (torch.tensor(of, dtype=torch.int32) for of in zip(*batch, strict=True))
    names = {
        "self": SimpleNamespace(forward_metadata=SimpleNamespace(custom_mask=whole, mask_indptr=sizes.cumsum(0))),
        "sliding_window_size": 4,
        "window_start_pos": firsts,
        "prefix_lens": rests,
        "extend_seq_lens": widths,
        "bs": len(batch),
        "torch": torch,
    }
    exec(_MASK_OF_WINDOW, names)
    custom, starts = names["custom"], names["starts"]
    assert isinstance(custom, torch.Tensor)
    assert isinstance(starts, torch.Tensor)
    assert custom.shape == whole.shape  # of a fixed size, whatever the lengths are
    assert starts.dtype == sizes.dtype
    for number, (mask, (width, first, rest)) in enumerate(zip(masks, batch, strict=True)):
        rows = custom[int(starts[number]) : int(starts[number + 1])]
        assert torch.equal(rows.view(width, rest + width), mask[:, first:])
