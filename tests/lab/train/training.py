"""Training of a target and its drafts: what a draft is, the optimizer, and what is made smaller."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, smooth_l1_loss

from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.families import family_of
from eagletwin.harness.families.mtp import PREFIX
from eagletwin.harness.families.recipe import Recipe
from eagletwin.reference.draft_heads import behind
from eagletwin.reference.eagle import DraftRows, Head, draft_rows
from eagletwin.reference.layers import rms_norm
from eagletwin.reference.llama import side_by_side, target_rows
from eagletwin.reference.sizes import LlamaShape

from .settings import BEGIN, END, Course, PairSettings
from .text import Corpus, drawn_windows, spread_windows

# The optimizer of every model here: AdamW, a rate that rises and falls, gradients of bounded size.

_WARM_UP = 0.05  # of all steps, in which the rate rises from nothing
_LAST = 0.05  # of the largest rate: what is left of it in the end
_REPORTS = 5


def optimise(
    parameters: Sequence[Tensor], course: Course, loss: Callable[[], Tensor], report: Callable[[int, float], None]
) -> None:
    """Change the parameters for `course.steps` steps, each to make one scalar of loss() smaller.

    report: now and then, with the number of steps done and the loss of the last one.
    """
    optimizer = torch.optim.AdamW(parameters, lr=course.rate, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, course.steps))
    for step in range(1, course.steps + 1):
        optimizer.zero_grad()
        now = loss()
        now.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, course.steps // _REPORTS) == 0:
            report(step, now.item())


def share_of_rate(step: int, steps: int) -> float:
    """Share of the largest rate at a step: a line up, then half a cosine down."""
    rising = max(1, round(_WARM_UP * steps))
    if step < rising:
        return (step + 1) / rising
    done = min(1.0, (step - rising) / max(1, steps - rising))
    return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * done)) / 2


# Drafts of every position of a text at once, each fed its own states: what a head does in a round, in a form to train.
#
# Row i of step 0 is a committed row: it consumes the target's state. Row i of step j consumes the next token of the text, and
# the state that row i of step j - 1 computed, as draft decode step j does behind M = i + 1 committed rows (chain.py). It sees
# the committed rows up to i and its own earlier ones. A test holds this equal to the reference's chain.


def unroll(head: Head, windows: Tensor, hidden: Tensor, layer: int, steps: int) -> list[DraftRows]:
    """Rows of each step, R = B * T of them, window after window; row i of step j proposes x[i + 2 + layer + j].

    windows [B, >= T + layer + steps] tokens; hidden [B, T, ..] the target's states, as it hands them over
    layer: 0, or a layer of an MTP draft, whose rows consume tokens that lie so much further ahead
    """
    count, length = hidden.shape[:2]
    _, positions, sees = side_by_side([length] * count)
    sees, own = sees.to(hidden.device), torch.eye(count * length, dtype=torch.bool, device=hidden.device)
    state, before, found = head.feed(hidden.flatten(0, 1)), None, list[DraftRows]()
    for step in range(steps):
        ahead = 1 + layer + step
        rows = draft_rows(head, windows[:, ahead : ahead + length].flatten(), state, positions + step, sees, before)
        found.append(rows)
        state, before = rows.hidden, behind(before, rows)
        sees = torch.cat([sees, own], 1)
    return found


# The drafts of a pair: each is a recipe of its family, with weights that are yet to be trained.
#
# A recipe says how its family lays out the checkpoint, and makes the reference's heads of the weights. What is trained is
# therefore what the reference checks, and what is written is what SGLang reads.

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft that is to be trained.

    name      of the draft, and of its folder
    recipe    its family and sizes
    proposes  [N] the tokens that it can propose
    tensors   name -> shape, by the names of its family's heads
    """

    name: str
    recipe: Recipe
    proposes: Tensor
    tensors: dict[str, tuple[int, ...]]

    @property
    def keeps_states(self) -> bool:
        """Whether a state that the head computes should be the target's next one. EAGLE-3 leaves it free."""
        return self.recipe.target_hidden != "aux"

    def initial(self, seed: int) -> Weights:
        """Weights before training, float32: norms are ones, biases zeros, matrices small random numbers."""
        generator = torch.Generator().manual_seed(seed)

        def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
            if name.endswith("norm.weight"):
                return torch.ones(shape)
            if name.endswith("bias"):
                return torch.zeros(shape)
            return torch.randn(shape, generator=generator).mul(0.5 * float(shape[-1]) ** -0.5)

        return {name: tensor(name, shape) for name, shape in self.tensors.items()}

    def heads(self, weights: Weights, target: Weights) -> tuple[Head, ...]:
        """The reference's heads of these weights, by layer; in the dtype and on the device of both."""
        proposes = self.proposes.to(target["lm_head.weight"].device)
        embedding, lm_head = target["model.embed_tokens.weight"], target["lm_head.weight"]
        return family_of(self.recipe).heads(self.recipe, weights, embedding, lm_head, proposes)

    def checkpoint(self, weights: Weights) -> Weights:
        """The tensors as a checkpoint has them: those of a draft with a vocabulary of its own need d2t [N], int64."""
        if self.recipe.draft_vocab_size is None:
            return weights
        return {**weights, "d2t": self.proposes - torch.arange(len(self.proposes))}


def draft_plans(settings: PairSettings, frequent: Tensor) -> dict[str, DraftPlan]:
    """The drafts of a pair, by name. frequent [N]: the tokens that the EAGLE-3 draft proposes."""
    plain, width = replace(settings.target, aux_layers=()), settings.intermediate_size
    everything = torch.arange(settings.target.vocab_size)
    one = dict(_eagle_tensors(settings.draft, width))
    layers = {PREFIX.format(n) + name: shape for n in range(settings.mtp_layers) for name, shape in one.items()}
    eagle3 = dict(_eagle3_tensors(settings, len(frequent)))
    reduced = _recipe(settings, "llama_eagle3", settings.target, vocabulary=len(frequent))
    plans = (
        DraftPlan("eagle", _recipe(settings, "llama", plain), everything, one),
        DraftPlan("eagle3", reduced, frequent, eagle3),
        DraftPlan("mtp", _recipe(settings, "llama_mtp", plain, layers=settings.mtp_layers), everything, layers),
    )
    return {plan.name: plan for plan in plans}


def _recipe(settings: PairSettings, family: str, target: LlamaShape, vocabulary: int | None = None, layers: int = 0) -> Recipe:
    """A recipe whose weights come from training: the fields that say how to draw them are zero."""
    return Recipe(
        name=f"trained-{settings.name}",
        family=family,
        target=target,
        draft=settings.draft,
        intermediate_size=settings.intermediate_size,
        max_position=settings.max_position,
        seed=settings.seed,
        noise=0.0,
        attention_gain=0.0,
        mlp_gain=0.0,
        target_hidden="aux" if target.aux_layers else "post_norm",
        min_share=0.0,
        draft_vocab_size=vocabulary,
        mtp_layers=layers,
    )


def _layer_tensors(shape: LlamaShape, reads: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A decoder layer whose attention reads `reads` numbers a row, without the norms before it."""
    size, heads, kv_heads = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "self_attn.q_proj.weight", (heads, reads)
    yield "self_attn.k_proj.weight", (kv_heads, reads)
    yield "self_attn.v_proj.weight", (kv_heads, reads)
    yield "self_attn.o_proj.weight", (size, heads)
    yield "post_attention_layernorm.weight", (size,)
    yield "mlp.gate_proj.weight", (width, size)
    yield "mlp.up_proj.weight", (width, size)
    yield "mlp.down_proj.weight", (size, width)


def _eagle_tensors(shape: LlamaShape, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    size = shape.hidden_size
    yield "fc.weight", (size, 2 * size)
    yield "fc.bias", (size,)
    for name, tensor in _layer_tensors(shape, size, width):
        yield f"layers.0.{name}", tensor


def _eagle3_tensors(settings: PairSettings, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    size = settings.draft.hidden_size
    yield "fc.weight", (size, len(settings.target.aux_layers) * size)
    yield "midlayer.input_layernorm.weight", (size,)
    yield "midlayer.hidden_norm.weight", (size,)
    for name, tensor in _layer_tensors(settings.draft, 2 * size, settings.intermediate_size):
        yield f"midlayer.{name}", tensor
    yield "norm.weight", (size,)
    yield "lm_head.weight", (vocabulary, size)


# The target: transformers' Llama, trained in float32 to say the next byte of the text.

_WINDOWS_OF_TARGET = 32


def train_target(
    settings: PairSettings, corpus: Corpus, device: str, say: Callable[[str], None]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights by Hugging Face's names, float32, on the CPU; and the loss on held-out text, in nats a token, before and after.

    Raises HarnessError if transformers is missing.
    """
    course = settings.target_course
    generator = torch.Generator().manual_seed(settings.seed)
    model = new_model(settings).to(device)
    held_out = spread_windows(corpus.held_out, _WINDOWS_OF_TARGET, course.length + 1)

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


# Training of a draft: its drafts shall be distributed as the target's next tokens are.
#
# What is smaller the better a head is: the cross entropy between the target's distribution and the draft's, over the tokens
# that the draft can propose; and for a head whose states stand for the target's, the smooth L1 distance of the two, as in EAGLE
# (arXiv 2401.15077 §3.2). Each step of a head that consumes its own states counts alike, after EAGLE-3 (arXiv 2503.01840 §3.1).

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
