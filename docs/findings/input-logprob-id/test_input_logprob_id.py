"""Prompt logprobs name the prompt's tokens, even the vocabulary's last one."""

import unittest
from types import SimpleNamespace

from sglang.srt.managers.scheduler_components.logprob_result_processor import (
    SchedulerLogprobResultProcessor,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

VOCAB_SIZE = 96


def _named(prompt, start):
    """Return the ids that go with a prompt's logprobs."""
    processor = SchedulerLogprobResultProcessor(
        model_config=SimpleNamespace(vocab_size=VOCAB_SIZE)
    )
    req = SimpleNamespace(
        is_prefill_only=False,
        origin_input_ids=prompt,
        logprob_start_len=start,
        logprob=SimpleNamespace(),
    )
    processor._process_input_token_logprobs(req, [0.0] * (len(prompt) - start))
    return req.logprob.input_token_logprobs_idx


class TestInputLogprobId(unittest.TestCase):
    def test_every_token_of_the_vocabulary(self):
        prompt = list(range(VOCAB_SIZE))
        self.assertEqual(_named(prompt, 0), prompt)

    def test_from_within_the_prompt(self):
        self.assertEqual(_named([7, 5, VOCAB_SIZE - 1], 1), [5, VOCAB_SIZE - 1])

    def test_ids_of_images_are_replaced(self):
        self.assertEqual(_named([7, VOCAB_SIZE, 10**9], 0), [7, 0, 0])


if __name__ == "__main__":
    unittest.main()
