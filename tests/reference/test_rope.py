"""Stretched rotary embeddings against transformers' own functions."""

import pytest
import torch

from eagletwin.reference.layers import frequencies, rotate
from eagletwin.reference.sizes import RopeScaling

HALF, THETA, ORIGINAL = 32, 10000.0, 2048

# What a config.json says, and what it means here.
FORMS: dict[str, tuple[dict[str, object], RopeScaling]] = {
    "linear": (
        {"rope_type": "linear", "factor": 4.0},
        RopeScaling(kind="linear", factor=4.0),
    ),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        RopeScaling(kind="llama3", factor=8.0, original=ORIGINAL, seldom=1.0, often=4.0),
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0},
        RopeScaling(kind="yarn", factor=4.0, original=ORIGINAL, amplitude=1.1386294361119891),
    ),
    "yarn without whole pairs": (
        {"rope_type": "yarn", "factor": 32.0, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
        RopeScaling(
            kind="yarn", factor=32.0, original=ORIGINAL, seldom=2.0, often=20.0, amplitude=1.3465735902799727, truncate=False
        ),
    ),
}


@pytest.mark.slow  # the import of transformers
@pytest.mark.parametrize("form", sorted(FORMS))
def test_frequencies_are_those_of_transformers(form: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    said, scaling = FORMS[form]
    config = LlamaConfig(
        hidden_size=4 * 2 * HALF,
        num_attention_heads=4,
        head_dim=2 * HALF,
        max_position_embeddings=ORIGINAL * 8,
        rope_parameters={"rope_theta": THETA, "original_max_position_embeddings": ORIGINAL, **said},
    )
    theirs, amplitude = ROPE_INIT_FUNCTIONS[str(said["rope_type"])](config, torch.device("cpu"))
    ours = frequencies(HALF, THETA, scaling)
    # transformers works in float32
    assert (ours - theirs.double()).abs().max() <= 1e-6 * ours.max()
    assert amplitude == pytest.approx(scaling.amplitude, rel=1e-12)
    assert not torch.equal(ours, frequencies(HALF, THETA)), "this form must change something"


def test_amplitude_multiplies_what_is_turned() -> None:
    x, positions = torch.ones(3, 1, 2 * HALF, dtype=torch.float64), torch.arange(3)
    plain = RopeScaling(kind="yarn", factor=4.0, original=ORIGINAL)
    louder = RopeScaling(kind="yarn", factor=4.0, original=ORIGINAL, amplitude=2.0)
    assert torch.allclose(rotate(x, positions, THETA, louder), 2 * rotate(x, positions, THETA, plain))
