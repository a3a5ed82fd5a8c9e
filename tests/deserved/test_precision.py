"""The band of a type of 16 bits is measured: it is as wide as that type rounds, and holds what such rounding does."""

import pytest
import torch
from msgspec.structs import replace

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.deserved.follow import Shape, chain_logits
from eagletwin.harness.deserved.precision import Pair, Rounding, load_served
from eagletwin.harness.families.store import checkpoints

from .started import STARTED

pytestmark = pytest.mark.slow  # transformers is imported

STEPS, LENGTH = 3, 60


def served(model: str, dtype: str) -> Pair:
    target, draft = map(str, checkpoints(model))
    return load_served(target, draft, replace(STARTED, dtype=dtype), "cpu")


def band(pair: Pair, tokens: list[int]) -> float:
    assert pair.precision is not None
    return pair.precision.tie(tokens, pair.read(tokens).hidden, STEPS)


def text(seed: int) -> list[int]:
    drawn: list[int] = torch.randint(0, 90, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


@pytest.mark.parametrize("model", ["llama-gqa", "llama-eagle3", "llama-mtp"])
def test_a_band_is_as_wide_as_its_type_rounds(model: str) -> None:
    longer, shorter = (served(model, dtype) for dtype in ("float16", "bfloat16"))
    for seed in range(3):
        # 11 and 8 significant bits; the largest of some hundred errors is one of a sample
        assert 4 < band(shorter, text(seed)) / band(longer, text(seed)) < 16


def test_a_draft_of_several_layers_is_refused_in_16_bits() -> None:
    with pytest.raises(InputError, match="several layers"):
        served("llama-mtp", "bfloat16").must_draft(Shape(STEPS))
    served("llama-mtp", "float32").must_draft(Shape(STEPS))


def test_float32_needs_no_measuring() -> None:
    assert served("llama-gqa", "float32").precision is None


def test_what_other_roundings_do_lies_in_the_band() -> None:
    """The engine's roundings are not ours: here, those of the head behind other neighbours of the exact states."""
    pair = served("llama-gqa", "bfloat16")
    assert pair.precision is not None
    for seed in range(5):
        tokens = text(seed)
        ids, width = torch.tensor(tokens), band(pair, tokens)
        exact_states = pair.read(tokens).hidden.double()
        exact = [logits for _, logits in chain_logits(pair.draft, ids, exact_states, STEPS)]
        other_states = (exact_states * 1.001).to(torch.bfloat16).double()
        with Rounding(torch.bfloat16):
            other = [logits for _, logits in chain_logits(pair.draft, ids, other_states, STEPS)]
        for one, two in zip(exact, other, strict=True):
            size = one.abs().amax(-1)
            best = one.topk(2).indices
            off = (two - one).gather(-1, best)
            assert (off[..., 0] - off[..., 1]).abs().div(size).max() < width
