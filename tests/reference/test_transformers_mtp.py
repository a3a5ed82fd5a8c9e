"""What transformers drafts with a DeepSeek-V3's own NextN layer, loaded from the checkpoint that SGLang reads.

`generate(use_mtp=True)` keeps caches of target and layers, drafts a token a layer and verifies them: an outside draft. More
layers than the recipe's one are copies of it with another projection each, chained as DeepSeek-V3 describes them.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.store import checkpoints
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.llama import target_rows
from eagletwin.reference.mtp import draft_extend

from .deepseek import near

PROMPTS, NEW_TOKENS = 3, 20


def _of_layer(projection: Tensor, layer: int) -> Tensor:
    """eh_proj of a further layer: its rows moved on, so that no two layers are the same."""
    return projection.roll(layer, 0)


def _loaded(name: str, layers: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' model of the target's configuration, from one folder with the weights of all."""
    from transformers import DeepseekV3ForCausalLM

    target, draft = checkpoints(name)
    config = json.loads((target / "config.json").read_bytes()) | {"num_nextn_predict_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    weights, first = load_file(target / "model.safetensors"), RECIPES[name].target.num_layers
    for layer in range(layers):
        for key, tensor in load_file(draft / "model.safetensors").items():
            own = key.replace(f"layers.{first}.", f"layers.{first + layer}.")
            weights[own] = _of_layer(tensor, layer) if "eh_proj" in key else tensor.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # its class names the NextN layer of the real model, 61
    added = [rf"model\.layers\.{first + layer}\..*" for layer in range(layers)]
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", added)
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float64, **kinds).eval()


def _rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each round that is to come: the committed tokens, what is drafted behind them, and its logits."""
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    found: list[tuple[Tensor, Tensor, Tensor]] = []
    drafted = MTPCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: Tensor, *others: Any, **named: Any) -> Any:
        ids, logits = drafted(self, input_ids, *others, **named)
        if logits is not None:
            found.append((input_ids[0].clone(), ids[0, input_ids.shape[1] :].clone(), logits[0].double()))
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    return found


@pytest.mark.slow  # the import of transformers
@pytest.mark.parametrize(("name", "layers"), [("deepseek-nextn", 1), ("deepseek-nextn-yarn", 1), ("deepseek-nextn", 3)])
def test_each_draft_of_a_generation_is_that_of_transformers(
    name: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    weights, head = pair.reference_target(), pair.reference_head(recipe)
    projections = [_of_layer(head.weights["eh_proj.weight"], layer) for layer in range(layers)]
    heads = [replace(head, weights=head.weights | {"eh_proj.weight": own}) for own in projections]
    model, rounds = _loaded(name, layers, tmp_path, monkeypatch), _rounds(monkeypatch)
    accepted = refused = 0
    for seed in range(PROMPTS):
        prompt = torch.randint(0, 96, (1, 5 + 9 * seed), generator=torch.Generator().manual_seed(seed))
        settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        rounds.clear()
        with torch.no_grad():
            [text] = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), use_mtp=True, max_new_tokens=NEW_TOKENS, **settings
            )
        ours = target_rows(weights, recipe.target, text)
        assert ours.logits[prompt.shape[1] - 1 : -1].argmax(-1).tolist() == text[prompt.shape[1] :].tolist()
        for committed, drafts, logits in rounds:
            rows = draft_extend(heads, True, committed, ours.hidden, range(len(committed) - 1), [None] * layers)
            mine = torch.stack([layer.logits[-1] for layer in rows])
            assert mine.argmax(-1).tolist() == drafts.tolist()
            assert near(mine, logits)
            follows = text[len(committed) : len(committed) + 1].tolist()
            accepted, refused = (
                accepted + (follows == drafts[:1].tolist()),
                refused + (follows not in ([], drafts[:1].tolist())),
            )
    assert accepted > 10
    assert refused > 5  # so that both ways of a cache are gone
