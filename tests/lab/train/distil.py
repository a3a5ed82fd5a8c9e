"""Training of a draft: its drafts shall be distributed as the target's next tokens are.

What is smaller the better a head is: the cross entropy between the target's distribution and the draft's, over the tokens that
the draft can propose; and for a head whose states stand for the target's, the smooth L1 distance of the two, as in EAGLE
(arXiv 2401.15077 §3.2). Each step of a head that consumes its own states counts alike, after EAGLE-3 (arXiv 2503.01840 §3.1).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from eagletwin.reference.eagle import Head
from eagletwin.reference.layers import rms_norm
from eagletwin.reference.llama import target_rows

from .heads import DraftPlan, Weights
from .optimise import optimise
from .settings import PairSettings
from .text import Corpus, drawn_windows, spread_windows
from .unroll import unroll

_STATES = 1.0  # weight of the distance of states, where they count
_HELD_OUT_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class Lesson:
    """Windows of text, and what the target computes for them; B windows of L tokens.

    windows [B, L]; hidden [B, L, ..] as handed over; states [B, L, H] after the final norm; logits [B, L, V]
    """

    windows: Tensor
    hidden: Tensor
    states: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Pupil:
    """One head in training: layer `layer` of its draft, which makes `steps` drafts in a row."""

    head: Head
    plan: DraftPlan
    layer: int
    steps: int

    def lesson(self, target: Weights, windows: Tensor) -> Lesson:
        """What the target computes for windows [B, L], on the device of its weights."""
        shape = self.plan.recipe.target
        windows = windows.to(target["lm_head.weight"].device)
        with torch.no_grad():
            rows = target_rows(target, shape, windows.flatten(), [windows.shape[1]] * len(windows))
            states = rms_norm(rows.residual, target["model.norm.weight"], shape.rms_norm_eps)
        return Lesson(windows, *(part.view(*windows.shape, -1) for part in (rows.hidden, states, rows.logits)))

    def losses(self, lesson: Lesson) -> Iterator[tuple[Tensor, Tensor]]:
        """(cross entropy in nats a token, distance of the states) of each step, scalars."""
        length = lesson.windows.shape[1] - self.layer - self.steps  # rows of a window whose last draft it still holds
        tokens = self.plan.proposes.to(lesson.logits.device)
        for step, rows in enumerate(unroll(self.head, lesson.windows, lesson.hidden[:, :length], self.layer, self.steps)):
            behind = slice(1 + self.layer + step, 1 + self.layer + step + length)  # the token that a row consumes
            goal = lesson.logits[:, behind, tokens].flatten(0, 1).softmax(-1)  # [R, N]
            entropy = -(goal * rows.logits[:, tokens].log_softmax(-1)).sum(-1).mean()
            yield entropy, smooth_l1_loss(rows.hidden, lesson.states[:, behind].flatten(0, 1))

    def loss(self, lesson: Lesson) -> Tensor:
        """What training makes smaller, a scalar."""
        states = _STATES if self.plan.keeps_states else 0.0
        return torch.stack([entropy + states * distance for entropy, distance in self.losses(lesson)]).mean()


def train_draft(
    settings: PairSettings, plan: DraftPlan, target: Weights, corpus: Corpus, say: Callable[[str], None]
) -> tuple[Weights, list[dict[str, float]]]:
    """Weights of a draft, float32, on the CPU, by the names of its heads; and of each layer and step the cross entropy on
    held-out text, in nats a token, before and after. The target's weights are float32, on the device to train on."""
    layers = plan.recipe.mtp_layers
    device = target["lm_head.weight"].device
    weights = {name: tensor.to(device).requires_grad_() for name, tensor in plan.initial(settings.seed).items()}
    losses: list[dict[str, float]] = []
    for layer, head in enumerate(plan.heads(weights, target)):
        pupil = Pupil(head, plan, layer, 1 if layers else settings.self_fed)
        losses += _train_head(settings, pupil, target, corpus, say)
    return {name: tensor.detach().cpu() for name, tensor in weights.items()}, losses


def _train_head(
    settings: PairSettings, pupil: Pupil, target: Weights, corpus: Corpus, say: Callable[[str], None]
) -> list[dict[str, float]]:
    course, layer = settings.draft_course, pupil.layer
    length = course.length + layer + pupil.steps
    generator = torch.Generator().manual_seed(settings.seed + layer)
    held_out = spread_windows(corpus.held_out, _HELD_OUT_WINDOWS, length)
    name = pupil.plan.name + (f", layer {layer}" if pupil.plan.recipe.mtp_layers else "")

    def on_held_out() -> list[float]:
        with torch.no_grad():
            found = [[entropy.item() for entropy, _ in pupil.losses(pupil.lesson(target, window[None]))] for window in held_out]
        return [fmean(step) for step in zip(*found, strict=True)]

    before = on_held_out()
    optimise(
        list(pupil.head.weights.values()),
        course,
        lambda: pupil.loss(pupil.lesson(target, drawn_windows(corpus.training, course.windows, length, generator))),
        lambda step, loss: say(f"  {name}: step {step} of {course.steps}, loss {loss:.3f}"),
    )
    after = on_held_out()
    return [{"before": first, "held_out": last} for first, last in zip(before, after, strict=True)]
