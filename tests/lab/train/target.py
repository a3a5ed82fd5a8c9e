"""The target: transformers' Llama, trained in float32 to say the next byte of the text."""

from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from eagletwin.harness.core.errors import HarnessError

from .optimise import optimise
from .settings import BEGIN, END, PairSettings
from .text import Corpus, drawn_windows, spread_windows

_HELD_OUT_WINDOWS = 32


def train_target(
    settings: PairSettings, corpus: Corpus, device: str, say: Callable[[str], None]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights by Hugging Face's names, float32, on the CPU; and the loss on held-out text, in nats a token, before and after.

    Raises HarnessError if transformers is missing.
    """
    course = settings.target_course
    generator = torch.Generator().manual_seed(settings.seed)
    model = new_model(settings).to(device)
    held_out = spread_windows(corpus.held_out, _HELD_OUT_WINDOWS, course.length + 1)

    def of(windows: Tensor) -> Tensor:
        windows = windows.to(device)
        logits = model(windows[:, :-1], use_cache=False).logits  # [B, T, V]
        return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def on_held_out() -> float:
        with torch.no_grad():
            return fmean(of(window[None]).item() for window in held_out)

    losses = {"before": on_held_out()}
    optimise(
        list(model.parameters()),
        course,
        lambda: of(drawn_windows(corpus.training, course.windows, course.length + 1, generator)),
        lambda step, loss: say(f"  target: step {step} of {course.steps}, loss {loss:.3f}"),
    )
    losses["held_out"] = on_held_out()
    say(f"  target: {losses['held_out']:.3f} nats a byte on held-out text")
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}, losses


def new_model(settings: PairSettings) -> Any:
    """Transformers' Llama of these sizes, untrained. Raises HarnessError if transformers is missing."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise HarnessError(
            f"transformers cannot be imported: {error}",
            consequence="the target is transformers' Llama, so nothing was trained",
            remedy="`make setup`, or install transformers into this environment",
        ) from error
    shape = settings.target
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=settings.max_position,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=False,
        bos_token_id=BEGIN,
        eos_token_id=END,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        return LlamaForCausalLM(config).float().train()
