"""What SGLang computes in two ways, on the host or in torch and in a kernel."""

from eagletwin.harness.commands.kernels.properties.two_ways import PROPERTIES

from .tests_of import make_tests

test_property, test_planted_fault_is_caught = make_tests(PROPERTIES)
