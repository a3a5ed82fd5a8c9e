"""Which slots each branch of each draft step reads, as the attention backends are given them."""

from eagletwin.harness.commands.kernels.properties.cache_locs import Requests
from eagletwin.harness.commands.kernels.properties.kv_indices import PROPERTIES, Reads, steps_read_prefix_and_branch

from .tests_of import make_tests

test_property, test_planted_fault_is_caught = make_tests(PROPERTIES)


def test_a_prefix_longer_than_one_block_of_the_kernel() -> None:
    """128 lanes, or 512 in the form with several programs for one prefix."""
    wide = Requests((100,), (3,))
    for split in (0, 2):
        steps_read_prefix_and_branch(Reads(wide, 2, 3, 4, split=split))
