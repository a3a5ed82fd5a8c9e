# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""After a chunk of a prompt the drafter consumes the prompt's next token."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

pytestmark = pytest.mark.cpu_test

VOCAB_SIZE = 100


class _Prepared(Exception):
    """Ends propose_draft_token_ids once the drafter's tokens are known."""


def _select(sampled, discarded, backup, next_tokens, counts, vocab_size, *_, **__):
    """The Triton kernel, which a CPU cannot launch."""
    for row, tokens in enumerate(sampled.tolist()):
        valid = [token for token in tokens if 0 <= token < vocab_size]
        valid = [] if discarded[row] else valid
        counts[row] = len(valid)
        next_tokens[row] = valid[-1] if valid else backup[row]


def _next_tokens(requests, sampled):
    """requests: (tokens that are known, where the step ends, whether it samples)."""
    drafter = EagleProposer.__new__(EagleProposer)
    drafter.backup_next_token_ids = CpuGpuBuffer(
        len(requests), dtype=torch.int32, device=torch.device("cpu"), pin_memory=False
    )
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.drafter = drafter
    runner.speculative_config = SimpleNamespace(
        method="eagle",
        disable_padded_drafter_batch=False,
        use_ngram_gpu=lambda: False,
        uses_extract_hidden_states=lambda: False,
        use_eagle=lambda: True,
    )
    names = [str(number) for number in range(len(requests))]
    runner.requests = {
        name: SimpleNamespace(get_token_id=list(tokens).__getitem__)
        for name, (tokens, _, _) in zip(names, requests)
    }
    runner.input_batch = SimpleNamespace(
        num_reqs=len(requests),
        req_ids=names,
        num_tokens_no_spec=[len(tokens) for tokens, _, _ in requests],
        vocab_size=VOCAB_SIZE,
    )
    discarded = torch.tensor([not samples for _, _, samples in requests])
    runner.discard_request_mask = SimpleNamespace(gpu=discarded)
    runner.optimistic_seq_lens_cpu = torch.tensor([end for _, end, _ in requests])
    found = []

    def keep(next_tokens, _):
        found.extend(next_tokens.tolist())
        raise _Prepared

    runner._copy_valid_sampled_token_count = keep
    step = SimpleNamespace(total_num_scheduled_tokens=1, num_spec_tokens_to_schedule=1)
    with (
        patch.object(llm_base_proposer, "_eagle_prepare_next_token_padded", _select),
        pytest.raises(_Prepared),
    ):
        runner.propose_draft_token_ids(
            step, torch.tensor(sampled), None, None, None, None, None, None, None
        )
    return found


def test_chunk_ends_in_the_prompts_next_token():
    prompt = [7, 19, 3, 5, 11]
    assert _next_tokens([(prompt, 2, False)], [[42, -1]]) == [3]


def test_other_requests_of_the_batch_end_in_what_was_sampled():
    requests = [([7, 19], 2, True), ([7, 19, 3, 5], 1, False), ([1, 2, 3], 3, True)]
    sampled = [[58, -1], [42, -1], [60, 61]]
    assert _next_tokens(requests, sampled) == [58, 19, 61]


def test_chunk_before_the_last_token():
    assert _next_tokens([([7, 19, 3], 2, False)], [[42, -1]]) == [3]
