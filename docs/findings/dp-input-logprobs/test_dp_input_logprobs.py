"""A copy to or from gathered rows ends where the rank's own tensor ends."""

import unittest
from unittest.mock import MagicMock, patch

import torch

from sglang.kernels.ops.memory import memcpy_triton as module
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def _rows_copied(dst, src, offset_src):
    """Return the rows that the kernel copies if the count is five."""
    kernel = MagicMock()
    with patch.object(module, "memcpy_triton_kernel", kernel):
        module.memcpy_triton(dst, src, 0, torch.tensor(1), torch.tensor(5), offset_src)
    return int(kernel.__getitem__.return_value.call_args.args[3])


class TestInputLogprobs(unittest.TestCase):
    def test_a_gather_reads_no_more_rows_than_there_are(self):
        self.assertEqual(_rows_copied(torch.zeros(8, 4), torch.zeros(1, 4), False), 1)

    def test_a_scatter_writes_no_more_rows_than_there_are(self):
        self.assertEqual(_rows_copied(torch.zeros(1, 4), torch.zeros(8, 4), True), 1)

    def test_all_rows_that_are_counted_and_there(self):
        self.assertEqual(_rows_copied(torch.zeros(8, 4), torch.zeros(5, 4), False), 5)


if __name__ == "__main__":
    unittest.main()
