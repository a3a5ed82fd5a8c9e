"""The rotation of input ids in multi-layer EAGLE: each layer consumes, row by row, the token after the layer below's."""

from eagletwin.harness.commands.kernels.properties.rotate import PROPERTIES, Rotation, ids_rotate

from .tests_of import make_tests

test_property, test_planted_fault_is_caught = make_tests(PROPERTIES)


def test_a_request_longer_than_many_blocks() -> None:
    ids_rotate(Rotation((70, 1, 0, 9), None))
