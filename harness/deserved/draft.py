"""The heads of a draft checkpoint, as the reference computes with them, and which states of the target they consume.

What SGLang shares with the target is shared here: the embedding always, the LM head of EAGLE-1/2 and MTP heads, and that of an
EAGLE-3 head which has none.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.families.mtp import PREFIX, layer_numbers, layer_of
from eagletwin.reference.draft_heads import Eagle3Head, proposed_tokens
from eagletwin.reference.eagle import EagleHead, Head, draft_rows
from eagletwin.reference.llama import Weights

from .checkpoint import Checkpoint

# Where torch may compute. No SGLang has to be there.


def on(device: "torch.device") -> AbstractContextManager[object]:
    """Where new tensors go. torch's own context takes each operation through Python, so it is entered where it makes a
    difference, and once."""
    import torch

    return nullcontext() if torch.get_default_device().type == device.type else device


def check_device(device: str) -> None:
    """Raises InputError for a GPU that torch does not see."""
    import torch  # the command line reads the options before that

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "torch is built without CUDA" if torch.version.cuda is None else "torch sees no NVIDIA GPU",
            consequence="nothing was run",
            remedy="use --device cpu, or a machine where `nvidia-smi` shows a GPU and torch has CUDA",
        )


# Which states a draft consumes: behind the target's final norm, in front of it, or what these layers (from 0) hand on.
States = Literal["post_norm", "pre_norm"] | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """What the target lends to a draft: embedding [V, H] and lm_head [V, H], and how many layers it has."""

    embedding: Tensor
    lm_head: Tensor
    num_layers: int


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft as the reference runs it.

    algorithm  which head it is, by SGLang's name; MTP: one head a step; STANDALONE: a plain language
               model, which reads no states
    heads      by layer; a single one drafts on by itself
    reads      which states of the target the rows consume
    chained    MTP: a layer consumes the state of the layer below
    """

    algorithm: Literal["EAGLE", "EAGLE3", "MTP", "STANDALONE"]
    heads: tuple[Head, ...]
    reads: States
    chained: bool = False

    @property
    def layers(self) -> int:
        """Steps that it can draft: of an MTP draft, its layers; of a single head, any number (0)."""
        return len(self.heads) if self.algorithm == "MTP" else 0


def read_draft(checkpoint: Checkpoint, shared: Shared, dtype: torch.dtype = torch.float64) -> DraftModel:
    """The draft of a checkpoint, in `dtype` and on the target's device.

    Raises InputError for an architecture that the reference does not know, and for tensors that are missing or of another
    shape.
    """
    reader = READERS.get(checkpoint.architecture)
    if reader is None:
        raise InputError(
            f"{checkpoint.folder} is a draft of architecture {checkpoint.architecture}, which the reference does not know",
            consequence="nothing is known of this pair",
            remedy="name a draft with one of: " + ", ".join(sorted(READERS)),
        )
    shared = replace(shared, embedding=shared.embedding.to(dtype), lm_head=shared.lm_head.to(dtype))
    device = shared.embedding.device
    tensors = {
        name.removeprefix("model."): tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in checkpoint.tensors.items()
    }
    try:
        draft = reader(checkpoint, tensors, shared)
        _try(draft)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"{checkpoint.folder} calls itself {checkpoint.architecture} and has tensors of other sizes: "
            f"{str(error).splitlines()[0]}",
            consequence="the head cannot be computed",
            remedy="see whether config.json and the tensors are of one checkpoint",
        ) from error
    except KeyError as error:
        raise InputError(
            f"{checkpoint.folder} calls itself {checkpoint.architecture} and has no tensor {error.args[0]}",
            consequence="the head cannot be computed",
            remedy="see whether the checkpoint is complete, and of the architecture that its config.json names",
        ) from error
    return draft


def _try(draft: DraftModel) -> None:
    """Run each head over one row: whatever it lacks is missed now. Raises KeyError, or RuntimeError for other sizes."""
    for head in draft.heads:
        width = head.weights["fc.weight"].shape[1] if isinstance(head, Eagle3Head) else head.embedding.shape[1]
        row = torch.zeros(1, dtype=torch.int64, device=head.embedding.device)
        with torch.no_grad(), on(row.device):
            hidden = head.feed(head.embedding.new_zeros(1, width))
            draft_rows(head, row, hidden, row, torch.ones(1, 1, dtype=torch.bool, device=row.device))


def round_weights(draft: DraftModel, dtype: torch.dtype) -> DraftModel:
    """The draft with weights of a shorter type, in the type that it is computed in. What the target lends stays."""

    def short(weight: Tensor) -> Tensor:
        return weight.to(dtype).to(weight.dtype) if weight.is_floating_point() else weight

    heads = tuple(replace(head, weights={name: short(tensor) for name, tensor in head.weights.items()}) for head in draft.heads)
    return replace(draft, heads=heads)


def _eagle(checkpoint: Checkpoint, tensors: Weights, shared: Shared) -> DraftModel:
    _fits(checkpoint, "fc.weight", tensors["fc.weight"], 2 * shared.embedding.shape[1])
    return DraftModel("EAGLE", (EagleHead(tensors, checkpoint.shape, shared.embedding, shared.lm_head),), "post_norm")


def _eagle3(checkpoint: Checkpoint, tensors: Weights, shared: Shared) -> DraftModel:
    config = checkpoint.config
    said = config.get("eagle_config") or {}
    layers = said.get("eagle_aux_hidden_state_layer_ids")
    reads = tuple(layers) if layers else default_layers(shared.num_layers)
    weights = {modern(name): tensor for name, tensor in tensors.items()}
    if not (said.get("norm_before_fc", config.get("norm_before_fc"))):
        weights.pop("input_norm.weight", None)
    if not (config.get("fc_norm") or config.get("use_aux_norm")):
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("fc_norm.")}
    for layer in range(1, checkpoint.shape.num_layers):  # SGLang leaves one that it does not find at ones
        if f"layers.{layer}.hidden_norm.weight" not in weights:
            raise KeyError(f"layers.{layer}.hidden_norm.weight")
    if config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = shared.embedding
    elif config.get("draft_vocab_size") is None:
        weights["lm_head.weight"] = shared.lm_head
    proposes = torch.arange(len(weights["lm_head.weight"]), device=shared.embedding.device)
    if "d2t" in weights:
        proposes = proposed_tokens(weights["d2t"])
    _fits(
        checkpoint,
        "fc.weight",
        weights["fc.weight"],
        len(reads) * (config.get("target_hidden_size") or shared.embedding.shape[1]),
    )
    if (
        len(proposes) != len(weights["lm_head.weight"])
        or int(proposes.max()) >= len(shared.embedding)
        or int(proposes.min()) < 0
    ):
        raise InputError(
            f"{checkpoint.folder}: d2t names tokens from {int(proposes.min())} to {int(proposes.max())} for "
            f"{len(weights['lm_head.weight'])} proposals, and the target has {len(shared.embedding)} tokens",
            consequence="what the head proposes means nothing",
            remedy="d2t holds, for each id of the draft, the difference to the target's id",
        )
    head = Eagle3Head(weights, checkpoint.shape, shared.embedding, proposes, bool(config.get("norm_output")))
    return DraftModel("EAGLE3", (head,), reads)


def _mtp(checkpoint: Checkpoint, tensors: Weights, shared: Shared) -> DraftModel:
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}  # as the family has them
    heads = tuple(
        EagleHead(layer_of(named, number), checkpoint.shape, shared.embedding, shared.lm_head)
        for number in layer_numbers(named)
    )
    if not heads:
        raise KeyError(PREFIX.format(0) + "fc.weight")
    return DraftModel("MTP", heads, "post_norm", checkpoint.architecture == "Step3p5MTP")


READERS: Mapping[str, Callable[[Checkpoint, Weights, Shared], DraftModel]] = {
    "LlamaForCausalLMEagle": _eagle,
    "Qwen2ForCausalLMEagle": _eagle,
    "LlamaForCausalLM": _eagle,  # what vLLM calls the head
    "EagleLlamaForCausalLM": _eagle,
    "LlamaForCausalLMEagle3": _eagle3,
    "LlamaForCausalLMMTP": _mtp,
    "Step3p5MTP": _mtp,
}


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose output an EAGLE-3 head consumes if its checkpoint names none: what enters layers 2, n/2 and n - 3."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def layers_in_vllm(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The same in vLLM: the numbers that a checkpoint names are of layers whose input is consumed (gpu_model_runner.py,
    _get_eagle3_aux_layers_from_config), where SGLang consumes their output (llama.py, set_eagle3_layers_to_capture)."""
    name = "eagle_aux_hidden_state_layer_ids"
    named = config.get(name) or (config.get("eagle_config") or {}).get(name)
    return tuple(layer - 1 for layer in named) if named else default_layers(num_layers)


def modern(name: str) -> str:
    """A tensor's name as the reference has it: `midlayer`, and a norm a state by its number."""
    for old, new in (("layers.0.", "midlayer."), ("aux_norm_low", "fc_norm.0"), ("aux_norm_mid", "fc_norm.1")):
        name = name.replace(old, new)
    return name.replace("aux_norm_high", "fc_norm.2")


def _fits(checkpoint: Checkpoint, name: str, weight: Tensor, width: int) -> None:
    if weight.shape[1] != width:
        raise InputError(
            f"{checkpoint.folder}: {name} takes states of {weight.shape[1]} numbers, and the target hands over {width}",
            consequence="this draft was not made for this target, or its config.json names other layers than it was trained on",
            remedy="name the target that the draft was trained with",
        )
