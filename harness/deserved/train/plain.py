"""A small language model beside a trained pair, as STANDALONE has for a draft; and what it loses without its first token.

It learns from windows that all begin with BEGIN, as models with a begin-of-text token do: that row is in every row's sight, and
says nothing of the text, so attention that has nowhere to go goes there. Large models come to lean on it by themselves, with
most of the attention of most heads (arXiv 2309.17453, 2410.10781); a model as small as this one does not, and is made to by a
term of its loss. SGLang runs such a draft on x[1..] at positions 0..
(ledger entry standalone-shift). Both ways are followed along the same replies of the target, by the reference alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from eagletwin.reference.llama import target_rows
from eagletwin.reference.plain import PlainDraft

from ..draft import DraftModel
from ..follow import follow_chains
from ..walk import walk
from .measure import Reply
from .optimise import optimise
from .settings import BEGIN, Course, PairSettings
from .target import new_model
from .text import Corpus, drawn_windows, spread_windows

LAYERS = 2
# Weight of the term that makes a model lean on its first row, beside nats a byte: minus the logarithm of the attention there.
LEANS = 0.03
_HELD_OUT_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A small model with and without its first token.

    loss, loss_without   nats a byte on held-out text
    attention            share of its attention that falls on the first row, by layer
    accepted, without    drafts accepted in each round, of each reply
    """

    loss: float
    loss_without: float
    attention: tuple[float, ...]
    accepted: tuple[tuple[int, ...], ...]
    without: tuple[tuple[int, ...], ...]


def small(settings: PairSettings) -> PairSettings:
    """The settings of the small model: half the target's layers, and half its steps."""
    course = settings.target_course
    shape = replace(settings.target, num_layers=LAYERS, aux_layers=())
    half = Course(steps=course.steps // 2, windows=course.windows, length=course.length, rate=course.rate)
    return replace(settings, target=shape, target_course=half, seed=settings.seed + 1)


def begun(windows: Tensor) -> Tensor:
    """Windows [B, L] with BEGIN in front: [B, 1 + L]."""
    return torch.cat([torch.full((len(windows), 1), BEGIN), windows], 1)


def train_plain(settings: PairSettings, corpus: Corpus, say: Callable[[str], None], *, leans: float = 0.0) -> dict[str, Tensor]:
    """Weights of the small model by Hugging Face's names, float32. leans: how much it is drawn to its first row."""
    course, generator = settings.target_course, torch.Generator().manual_seed(settings.seed)
    model = new_model(settings)
    if leans:
        model.set_attn_implementation("eager")  # which tells its attention

    def loss() -> Tensor:
        windows = begun(drawn_windows(corpus.training, course.windows, course.length, generator))
        made = model(windows[:, :-1], use_cache=False, output_attentions=leans > 0)
        of_text = cross_entropy(made.logits.flatten(0, 1), windows[:, 1:].flatten())  # logits [B, L, V]
        if not leans:
            return of_text
        first = torch.stack([layer[..., 1:, 0] for layer in made.attentions])  # [N, B, heads, L-1]
        return of_text - leans * first.clamp(min=1e-9).log().mean()

    optimise(
        list(model.parameters()),
        course,
        loss,
        lambda step, now: say(f"  the small model: step {step} of {course.steps}, loss {now:.3f}"),
    )
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def begun_replies(settings: PairSettings, target: dict[str, Tensor], held_out: Tensor) -> list[Reply]:
    """What the target says to held-out prompts behind BEGIN, in float64, with tokens to spare for what a round looks ahead."""
    found = []
    for prompt in begun(spread_windows(held_out, settings.prompts, settings.prompt_size)):
        tokens = prompt
        for _ in range(settings.new_tokens + settings.num_steps + 1):
            tokens = torch.cat([tokens, target_rows(target, settings.target, tokens).logits[-1:].argmax(-1)])
        found.append(Reply(len(prompt), tokens))
    return found


def first_token(
    settings: PairSettings, weights: dict[str, Tensor], held_out: Tensor, said: Sequence[Reply], num_steps: int
) -> FirstToken:
    """The small model of these settings, followed along the replies of the target. weights: float64."""
    windows = begun(spread_windows(held_out, _HELD_OUT_WINDOWS, settings.target_course.length))
    with torch.no_grad():
        losses = [[_loss(weights, settings, window[begin:]) for window in windows] for begin in (0, 1)]
        attention = _attention(settings, weights, windows)
    draft = PlainDraft(weights, settings.target)
    accepted, without = (
        tuple(_accepted(replace(draft, ahead=ahead), reply, num_steps, settings.new_tokens) for reply in said)
        for ahead in (0, 1)
    )
    return FirstToken(fmean(losses[0]), fmean(losses[1]), attention, accepted, without)


def _loss(weights: dict[str, Tensor], settings: PairSettings, window: Tensor) -> float:
    """Nats a byte of the second half of a window, at positions 0.. ."""
    half = len(window) // 2
    logits = target_rows(weights, settings.target, window[:-1]).logits
    return float(cross_entropy(logits[-half:], window[-half:]))


def _attention(settings: PairSettings, weights: dict[str, Tensor], windows: Tensor) -> tuple[float, ...]:
    """Share of the attention of a window's second half that falls on its first row, by layer."""
    model = new_model(settings)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    model.set_attn_implementation("eager")
    attentions = model(windows, use_cache=False, output_attentions=True).attentions  # each [B, N, L, L]
    half = windows.shape[1] // 2
    return tuple(float(layer[:, :, -half:, 0].mean()) for layer in attentions)


def _accepted(draft: PlainDraft, reply: Reply, num_steps: int, new_tokens: int) -> tuple[int, ...]:
    tokens = reply.tokens.tolist()
    followed = follow_chains(
        DraftModel("STANDALONE", (draft,), "post_norm"), tokens, torch.empty(len(tokens), 0), num_steps, 0.0
    )
    return tuple(walk(followed, reply.size).accepted_before(reply.size + new_tokens))
