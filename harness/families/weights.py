"""The numbers of a recipe: float32 weights from a seeded generator, and their digest.

The same recipe gives the same bytes on every machine with the same torch; the digest in a trace's header is what says so.
Another torch may round a random number otherwise: where the folder $EAGLETWIN_WEIGHTS is named, the weights are those in it
(`keep`), so that two machines have the same.
"""

import hashlib
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.run_spec import Dtype
from eagletwin.reference.draft_heads import proposed_tokens
from eagletwin.reference.eagle import Head
from eagletwin.reference.llama import target_rows

from . import RECIPES, family_of, llama
from .recipe import Recipe


@dataclass(frozen=True, slots=True)
class ModelPair:
    """float32 weights by the names of a Hugging Face Llama and of the reference's heads (d2t of an EAGLE-3 draft is int64), and
    one digest over both. store.py writes them by the names of the recipe's family."""

    target: dict[str, Tensor]
    draft: dict[str, Tensor]
    digest: str

    def reference_target(self) -> dict[str, Tensor]:
        return {name: tensor.double() for name, tensor in self.target.items()}

    def reference_heads(self, recipe: Recipe) -> tuple[Head, ...]:
        """The heads of a multi-layer draft, by layer; of any other, its one."""
        draft = {name: tensor.double() for name, tensor in self.draft.items() if name != "d2t"}
        embedding, lm_head = self.target["model.embed_tokens.weight"].double(), self.target["lm_head.weight"].double()
        return family_of(recipe).heads(recipe, draft, embedding, lm_head, self.proposes)

    @property
    def proposes(self) -> Tensor:
        """The target's token of each id of the draft's vocabulary [N]."""
        if "d2t" in self.draft:
            return proposed_tokens(self.draft["d2t"])
        return torch.arange(len(self.target["lm_head.weight"]))


@lru_cache(maxsize=8)  # a judge asks for the same pair once per trace
def model_pair(name: str) -> ModelPair:
    """The weights of the recipe called `name`. Raises KeyError for an unknown name."""
    kept = os.environ.get("EAGLETWIN_WEIGHTS")
    return _make_pair(*_load_weights(Path(kept) / f"{name}.safetensors")) if kept else _pair(RECIPES[name])


@lru_cache(maxsize=8)
def served_pair(name: str, dtype: Dtype) -> ModelPair:
    """The recipe's weights as an engine of this type loads them: the reference must have the same numbers.

    They are rounded, and kept in float32; the digest stays that of the checkpoint.
    """
    pair, recipe = model_pair(name), RECIPES[name]
    if dtype == "float32":
        return pair

    def round_weight(weight: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        less = family_of(recipe).norms_less if weight.endswith("norm.weight") else 0
        return (tensor - less).to(getattr(torch, dtype)).float() + less

    target, draft = ({key: round_weight(key, tensor) for key, tensor in part.items()} for part in (pair.target, pair.draft))
    return ModelPair(target, draft, pair.digest)


def other_pair(name: str) -> ModelPair:
    """Other weights of the same shapes: what a worker has before it is given the recipe's."""
    return _pair(replace(RECIPES[name], seed=RECIPES[name].seed + 1000))


def keep(folder: Path) -> None:
    """Write the weights of all recipes into a folder, for $EAGLETWIN_WEIGHTS on another machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in RECIPES:
        pair = model_pair(name)
        parts = (("target", pair.target), ("draft", pair.draft))
        save_file(
            {f"{part}.{weight}": tensor for part, tensors in parts for weight, tensor in tensors.items()},
            folder / f"{name}.safetensors",
        )


def _load_weights(file: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    if not file.is_file():
        raise InputError(
            f"$EAGLETWIN_WEIGHTS names a folder without {file.name}",
            consequence="engine and judge have no weights",
            remedy="unset it, or name the folder of a bundle",
        )
    parts: dict[str, dict[str, Tensor]] = {"target": {}, "draft": {}}
    for name, tensor in load_file(file).items():
        part, _, weight = name.partition(".")
        parts[part][weight] = tensor
    return parts["target"], parts["draft"]


def _make_pair(target: dict[str, Tensor], draft: dict[str, Tensor]) -> ModelPair:
    digest = hashlib.sha256()
    for part, tensors in (("target", target), ("draft", draft)):
        for weight_name, tensor in sorted(tensors.items()):
            digest.update(f"{part}.{weight_name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
    return ModelPair(target, draft, digest.hexdigest())


def _pair(recipe: Recipe) -> ModelPair:
    generator = torch.Generator().manual_seed(recipe.seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    size = recipe.target.hidden_size
    embedding = normal(recipe.target.vocab_size, size, std=1.0)
    target = {
        # rows of unit root mean square: the head's first layer, which has no input norm, then sees what the target's sees
        "model.embed_tokens.weight": embedding / embedding.square().mean(-1, keepdim=True).sqrt(),
        "model.norm.weight": 1 + normal(size, std=0.1),
        "lm_head.weight": normal(recipe.target.vocab_size, size, std=1.0),
    }
    layer = family_of(recipe).layer_weights or llama.layer_weights
    for number in range(recipe.target.num_layers):
        target |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer(recipe, number, normal).items()}

    draft = family_of(recipe).draft_weights(recipe, target, normal)
    target, draft = ({name: tensor.contiguous() for name, tensor in part.items()} for part in (target, draft))
    return _make_pair(target, draft)


# Greedy answers of a recipe's target, by the reference alone.


def target_says(model: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """The `count` tokens with which the target alone answers a prompt."""
    weights, shape = model_pair(model).reference_target(), RECIPES[model].target
    tokens = torch.tensor(prompt)
    for _ in range(count):
        tokens = torch.cat([tokens, target_rows(weights, shape, tokens).logits[-1:].argmax(-1)])
    return tokens[len(prompt) :].tolist()
