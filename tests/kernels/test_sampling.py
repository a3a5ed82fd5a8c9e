"""Verify that samples: the rejection kernel of a chain, which is Triton, and the sampling of a tree, which on CUDA is C++.

The C++ has no twin; tests/gpu holds it to `tree_is_sampled`, and here it is the engine's stand-in for it that is held. What a
function decided is followed coin by coin (reference/follow_sampling.py): float32 may decide otherwise than float64 only where
a coin comes within its error of a boundary, and never for a token without probability.
"""

import pytest
import torch

from eagletwin.harness.commands.kernels.properties.sampling import BELOW_ONE, PROPERTIES, Decided, SamplingCase, call
from eagletwin.harness.commands.kernels.release import SAMPLER, SAMPLING, load
from eagletwin.harness.commands.kernels.trees import Batch, Tree
from eagletwin.harness.engines.triton_cpu import KernelViolation
from eagletwin.reference.sampling import target_distribution

from .tests_of import make_tests

test_property, test_planted_fault_is_caught = make_tests(PROPERTIES)


def one(case: SamplingCase, coin: float, final: float) -> Decided:
    """A batch sampled with the same coins throughout."""
    count = len(case.batch.trees)
    coins, finals = torch.full((count, case.batch.nodes), coin, device="cpu"), torch.full((count,), final, device="cpu")
    return call(load(SAMPLING).chain_speculative_sampling_triton, case, coins, finals, case.drafts)


CHAIN = Tree(1, 2, ((0,), (1,)), (0, 1))


def chain_batch(requests: int, seed: int) -> Batch:
    return Batch(1, 2, 3, (CHAIN,) * requests, (0,) * requests, seed)


def test_a_draft_as_likely_as_the_target_thinks_is_always_accepted() -> None:
    case = SamplingCase(chain_batch(20, 4), 64, 2.0, 64, "same")
    assert one(case, BELOW_ONE, 0.5).paths == [[0, 1, 2]] * 20


def test_nothing_is_left_only_for_a_coin_of_one() -> None:
    """Coins are below 1 (seeded ones since 0.5.17). With one of 1 the draft is refused where p = q, nothing is left to draw
    from, and the kernel gives the last token of the vocabulary, of which p may be 0."""
    case = SamplingCase(chain_batch(1, 4), 64, 2.0, 2, "same")
    assert float(case.targets[0, 0, -1]) == 0
    decided = one(case, 1.0, 0.5)
    assert (decided.paths, decided.emitted) == ([[0]], [[63]])


def test_a_coin_next_to_one_may_draw_a_token_without_probability() -> None:
    """The sum of all and the running sum are added up in another order. Where rounding makes coin * sum reach the end of the
    running sum, the last token of the vocabulary is drawn. Coins of torch.rand come so close once in 2 ** 24."""
    case = SamplingCase(chain_batch(60, 5), 1000, 2.0, 500, "same")
    last = [
        float(row[2, -1]) == 0 and tokens[-1] == 999
        for row, tokens in zip(case.targets, one(case, 0.5, BELOW_ONE).emitted, strict=True)
    ]
    assert any(last)


def test_accept_index_is_addressed_by_the_strides_of_retrieve_index(runtime: str) -> None:
    """SGLang gives both the same shape, contiguous: num_draft_tokens is num_steps + 1 for every chain. Where it was not, rows
    would be written next to theirs; here, behind the last."""
    if runtime == "interpreter":  # which would write there
        pytest.skip("the interpreter checks no bounds")
    case = SamplingCase(chain_batch(1, 4), 8, 1.0, 8)
    wide = torch.zeros(1, 3, 2, dtype=torch.int64)
    accepts = torch.full((1, 3), -1, dtype=torch.int32)
    with pytest.raises(KernelViolation):
        load(SAMPLING).chain_speculative_sampling_triton(
            torch.zeros(3, dtype=torch.int32),
            accepts,
            torch.zeros(1, dtype=torch.int32),
            torch.tensor(case.candidates),
            wide[..., 0],
            None,
            None,
            torch.zeros(1, 3),
            torch.zeros(1),
            case.targets,
            case.drafts,
            1.0,
            1.0,
            True,
        )


def test_plain_sampling_cuts_by_top_k_and_top_p_at_once_and_verify_by_one_after_the_other() -> None:
    """Of 0.35, 0.25, 0.2, 0.06 and 0.14 in small parts, top_k 4 and top_p 0.82. Four tokens are needed for 0.82 of the whole:
    prefill may draw the fourth; of the 0.86 that top_k leaves three are enough, and verify never emits the fourth."""
    row = torch.tensor([[0.35, 0.25, 0.2, 0.06, *[0.01] * 14]])
    plain = load(SAMPLER).top_k_top_p_min_p_sampling_from_probs_torch
    limits = torch.tensor([4]), torch.tensor([0.82]), torch.tensor([0.0])
    torch.manual_seed(1)
    drawn = {int(plain(row.clone(), *limits, False, None, torch.tensor([0]))) for _ in range(400)}
    assert drawn == {0, 1, 2, 3}
    verified = target_distribution(row.double().log(), 1.0, 4, 0.82)
    assert verified.nonzero()[:, 1].tolist() == [0, 1, 2]
