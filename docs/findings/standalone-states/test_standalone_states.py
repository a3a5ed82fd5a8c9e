"""A batch that grows has hidden states of all its requests, or none."""

import unittest

import torch

from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

TOPK = 3


def _make_input(tokens, with_states):
    """Build the draft input of requests, which their bonus tokens identify."""
    bonus_tokens = torch.tensor(tokens)
    return EagleDraftInput(
        topk_p=torch.full((len(tokens), TOPK), 0.5),
        topk_index=bonus_tokens.unsqueeze(1).expand(-1, TOPK).clone(),
        bonus_tokens=bonus_tokens,
        hidden_states=bonus_tokens.float().unsqueeze(1) if with_states else None,
    )


class TestStatesOfABatchThatGrows(unittest.TestCase):
    def _assert_states_in_line(self, draft_input, tokens):
        self.assertEqual(draft_input.bonus_tokens.tolist(), tokens)
        self.assertEqual(draft_input.topk_index[:, 0].tolist(), tokens)
        if draft_input.hidden_states is not None:
            self.assertEqual(draft_input.hidden_states.flatten().tolist(), tokens)

    def _grow(self, running_has_states, new_has_states, kept):
        """Two running requests, then two new ones; `kept` of them continue."""
        tokens = [11, 12, 21, 22]
        draft_input = _make_input(tokens[:2], running_has_states)
        draft_input.merge_batch(_make_input(tokens[2:], new_has_states))
        try:
            draft_input.filter_batch(torch.tensor(kept))
        except IndexError as error:
            self.fail(f"the worker ends as it retracts a request: {error}")
        self._assert_states_in_line(draft_input, [tokens[n] for n in kept])
        return draft_input

    def test_running_requests_have_states_and_new_ones_have_none(self):
        # STANDALONE: draft extend in a CUDA graph returns states, a prefill none.
        # A request is retracted in the same iteration.
        for kept in ([0, 1, 2], [0, 2, 3], [0, 1, 2, 3]):
            with self.subTest(kept=kept):
                self._grow(True, False, kept)

    def test_new_requests_have_states_and_running_ones_have_none(self):
        self._grow(False, True, [0, 2, 3])

    def test_no_request_has_states(self):
        self.assertIsNone(self._grow(False, False, [1, 2]).hidden_states)

    def test_all_requests_have_states(self):
        self.assertIsNotNone(self._grow(True, True, [1, 2]).hidden_states)

    def test_idle_batch_takes_the_states_of_the_new_requests(self):
        draft_input = _make_input([], True)
        draft_input.merge_batch(_make_input([21, 22], True))
        self._assert_states_in_line(draft_input, [21, 22])
        self.assertIsNotNone(draft_input.hidden_states)


if __name__ == "__main__":
    unittest.main()
