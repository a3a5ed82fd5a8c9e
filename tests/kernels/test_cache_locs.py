"""Which slots each stage writes: of draft decode by branch and step, with and without pages; of verify and draft extend."""

import pytest
import torch

from eagletwin.harness.commands.kernels.properties.cache_locs import (
    PROPERTIES,
    Draft,
    Requests,
    assign,
    draft_slots_are_contiguous,
    prepared,
)
from eagletwin.harness.commands.kernels.release import UTILS, WORKER, load

from .tests_of import make_tests

test_property, test_planted_fault_is_caught = make_tests(PROPERTIES)


def test_the_buffer_of_all_steps_has_an_entry_for_each_step_and_branch() -> None:
    """PR #26239: one step's slots handed over in the place of all steps' are refused."""
    with pytest.raises(AssertionError, match=r"2\*3\*4=24"):
        load(UTILS).per_step_draft_out_cache_loc(torch.arange(6), 2, 3, 4)


def test_more_slots_than_one_block_of_the_kernel() -> None:
    """128 lanes: topk * num_steps is larger in wide trees."""
    draft_slots_are_contiguous(Draft(Requests((0, 3), (5, 2)), 8, 14))


def test_a_batch_of_nothing_has_no_slots_without_pages_and_cannot_be_asked_for_any_with_pages() -> None:
    """The copies of the prefix's partial page ask for the width of no row. SGLang's workers skip idle batches before this."""
    assert assign(Draft(Requests((), ()), 2, 2, 1))[0].tolist() == []
    assert load(UTILS).per_step_draft_out_cache_loc(torch.empty(0), 0, 2, 3).shape == (3, 0)
    with pytest.raises(RuntimeError, match="ambiguous"):
        load(WORKER).prepare_for_draft(*prepared(Draft(Requests((), ()), 2, 2, 4), []))
