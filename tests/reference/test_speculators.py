"""EAGLE-3 heads against speculators' own model of one, whose authors train and publish them. CI has no speculators:
docs/explanation/eagle3-heads.md says what was measured, and how this is run.

Its forward in training is a draft behind every row at once: step k of row i consumes x[i+1+k] and what step k-1 made of that
row, and sees the committed rows up to i and its own steps.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.recipe import Recipe
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import committed_rows
from eagletwin.reference.draft_heads import DraftRows, Eagle3Head
from eagletwin.reference.eagle import draft_rows
from eagletwin.reference.llama import target_rows

from .beside import near

pytest.importorskip("speculators", reason="speculators is not installed")

STEPS, LENGTH = 3, 20
MODELS = sorted(
    name for name, recipe in RECIPES.items() if recipe.algorithm == "EAGLE3" and recipe.draft.latent is None
)  # it has no head of latent attention


def _theirs(recipe: Recipe, head: Eagle3Head) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    shape, weights = head.shape, head.weights
    layers = LlamaConfig(
        vocab_size=recipe.target.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        attn_implementation="eager",
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=len(weights["lm_head.weight"]),
        norm_before_fc="input_norm.weight" in weights,
        fc_norm="fc_norm.0.weight" in weights,
        norm_output=head.norm_output,
        eagle_aux_hidden_state_layer_ids=list(range(weights["fc.weight"].shape[1] // recipe.target.hidden_size)),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = Eagle3DraftModel(config).double().eval()
    own = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
    own = {name.replace("layers.1.hidden_norm", "layers.1.input_layernorm"): tensor for name, tensor in own.items()}
    loaded = model.load_state_dict(own | {"embed_tokens.weight": head.embedding}, strict=False)
    assert not loaded.unexpected_keys
    assert all(name.startswith("verifier_") or name in ("d2t", "t2d") for name in loaded.missing_keys)
    return model


def _behind(head: Eagle3Head, rows: DraftRows, last: int, tokens: Tensor) -> list[Tensor]:
    """Logits [1, V] of the steps of a draft behind the committed row `last`, which is fed these tokens."""
    cut = slice(last + 1)
    before = DraftRows(rows.hidden[cut], rows.logits[cut], rows.keys[:, cut], rows.values[:, cut])
    state, found = rows.hidden[last : last + 1], list[Tensor]()
    for step, token in enumerate(tokens, 1):
        sees = torch.ones(1, last + 1 + step, dtype=torch.bool)
        row = draft_rows(head, token[None], state, torch.tensor([last + step]), sees, before)
        found.append(row.logits)
        state = row.hidden
        before = DraftRows(
            torch.cat([before.hidden, row.hidden]),
            torch.cat([before.logits, row.logits]),
            torch.cat([before.keys, row.keys], 1),
            torch.cat([before.values, row.values], 1),
        )
    return found


@pytest.mark.parametrize("name", MODELS)
def test_committed_rows_and_the_drafts_behind_each_are_those_of_speculators(name: str) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    head = pair.reference_heads(recipe)[0]
    assert isinstance(head, Eagle3Head)
    tokens = torch.randint(0, recipe.target.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    states = target_rows(pair.reference_target(), recipe.target, tokens).hidden
    model, theirs = _theirs(recipe, head), list[Tensor]()
    model.lm_head.register_forward_hook(lambda module, inputs, output: theirs.append(output[0]))
    with torch.no_grad():
        model(states[None, :-1], tokens[None, 1:], torch.zeros(1, LENGTH - 1, dtype=torch.long), ttt_steps=STEPS)
    rows = committed_rows(head, tokens, states)
    assert near(rows.logits[:, head.proposes], theirs[0])
    for last in range(LENGTH - STEPS):
        for step, logits in enumerate(_behind(head, rows, last, tokens[last + 2 : last + 1 + STEPS]), 1):
            assert near(logits[:, head.proposes], theirs[step][last : last + 1])
