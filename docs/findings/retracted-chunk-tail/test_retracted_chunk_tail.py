"""The token after a chunk is known wherever a retracted request's chunk ends."""

import unittest
from array import array
from types import SimpleNamespace

from sglang.srt.managers.schedule_batch import _compute_chunked_req_next_prompt_token
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

VOCAB_SIZE = 100
PROMPT, OUTPUT = [7, 19, 3], [21, 15, 53]


def _next_token(extend_end, prompt=PROMPT, output=OUTPUT):
    req = SimpleNamespace(
        origin_input_ids=array("q", prompt),
        output_ids=array("q", output),
        extend_end=extend_end,
    )
    return _compute_chunked_req_next_prompt_token(req, VOCAB_SIZE)


class TestChunkedReqNextToken(unittest.TestCase):
    def test_chunk_that_ends_in_the_prompt(self):
        self.assertEqual(_next_token(2), 3)

    def test_chunk_that_ends_with_the_prompt(self):
        self.assertEqual(_next_token(3), 21)

    def test_chunk_that_ends_in_what_was_emitted(self):
        self.assertEqual(_next_token(4), 15)
        self.assertEqual(_next_token(5), 53)

    def test_nothing_follows_the_last_chunk(self):
        self.assertIsNone(_next_token(6))
        self.assertIsNone(_next_token(3, output=[]))

    def test_multimodal_placeholder_is_skipped(self):
        self.assertIsNone(_next_token(1, prompt=[7, VOCAB_SIZE + 5, 3]))

    def test_no_chunked_request(self):
        self.assertIsNone(_compute_chunked_req_next_prompt_token(None, VOCAB_SIZE))


if __name__ == "__main__":
    unittest.main()
