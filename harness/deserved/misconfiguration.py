"""Mistakes of configuration, each as the draft that it makes; and which one a server's rounds, or a pair's own texts, show."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from eagletwin.reference.draft_heads import Eagle3Head, PlainDraft
from eagletwin.reference.eagle import EagleHead
from eagletwin.reference.sizes import LlamaShape

from .checkpoint import Checkpoint
from .conditions import Seen
from .draft import DraftModel, Shared, States, default_layers, modern, round_weights
from .follow import Followed, Shape
from .precision import Pair
from .rounds import compare
from .statistics import Text
from .target import Read

# A mistake is found from both ends. Where a server's rounds are not what the pair deserves, the draft that explains every one
# of them says what the server does. Where no server is asked, a draft that accepts clearly more than the one that the
# configuration describes says that the head was trained in another way.


@dataclass(frozen=True, slots=True)
class Mistake:
    """One way to read a checkpoint otherwise than it says.

    says   what an engine does that reads it so: "the server drafts as if ..."
    draft  what it computes
    """

    name: str
    says: str
    draft: DraftModel


def mistakes(draft: DraftModel, checkpoint: Checkpoint, target: Checkpoint, shared: Shared) -> list[Mistake]:
    """Each mistake that this draft can suffer and that changes what it computes."""
    found = [*_of_any(draft, checkpoint, target)]
    head = draft.heads[0]
    if isinstance(head, Eagle3Head):
        found += _of_eagle3(draft, head, checkpoint, shared)
    elif isinstance(head, EagleHead):
        reads: States = "post_norm" if draft.reads == "pre_norm" else "pre_norm"
        where = "behind" if reads == "post_norm" else "in front of"
        found.append(
            Mistake(
                "hidden-state", f"the draft consumed the target's state {where} its final norm", replace(draft, reads=reads)
            )
        )
    if len(draft.heads) > 1:
        same = replace(draft, heads=(draft.heads[0],) * len(draft.heads))
        found.append(Mistake("mtp-layers", "all layers of the draft had the weights of the first", same))
        other = "the layer below" if not draft.chained else "the target"
        found.append(
            Mistake("mtp-chained", f"a layer consumed the state of {other}", replace(draft, chained=not draft.chained))
        )
    return found


def _of_any(draft: DraftModel, checkpoint: Checkpoint, target: Checkpoint) -> Iterator[Mistake]:
    ours, theirs = checkpoint.shape, target.shape
    if (ours.rope_theta, ours.rope_scaling) != (theirs.rope_theta, theirs.rope_scaling):
        shape = replace(ours, rope_theta=theirs.rope_theta, rope_scaling=theirs.rope_scaling)
        yield Mistake("rope", "the draft had the rotary embedding of the target", _with_shape(draft, shape))
    if ours.rope_scaling is not None:
        yield Mistake(
            "rope-scaling", "rope_scaling of the draft were left out", _with_shape(draft, replace(ours, rope_scaling=None))
        )
    if ours.rope_theta != 10000.0:
        plain = replace(ours, rope_theta=10000.0)
        yield Mistake("rope-theta", "rope_theta of the draft were the default of 10000", _with_shape(draft, plain))
    embedding = {modern(name): tensor for name, tensor in checkpoint.tensors.items()}.get("embed_tokens.weight")
    if embedding is not None and embedding.shape == draft.heads[0].embedding.shape:
        own = embedding.to(draft.heads[0].embedding)
        if not torch.equal(own, draft.heads[0].embedding):
            heads = tuple(replace(head, embedding=own) for head in draft.heads if not isinstance(head, PlainDraft))
            yield Mistake("embedding", "the draft had the embedding of its own checkpoint", replace(draft, heads=heads))
    for name, dtype in (("bfloat16", torch.bfloat16), ("8 bits", torch.float8_e4m3fn)):
        yield Mistake(f"dtype-{name.split()[0]}", f"the draft's weights were rounded to {name}", round_weights(draft, dtype))


def _of_eagle3(draft: DraftModel, head: Eagle3Head, checkpoint: Checkpoint, shared: Shared) -> Iterator[Mistake]:
    assert not isinstance(draft.reads, str)
    for by, word in ((1, "one later"), (-1, "one earlier")):
        layers = tuple(layer + by for layer in draft.reads)
        if min(layers) >= 0 and max(layers) < shared.num_layers:
            says = f"the auxiliary layers were {word}: {', '.join(map(str, layers))}"
            yield Mistake(f"aux-layers{by:+}", says, replace(draft, reads=layers))
    layers = default_layers(shared.num_layers)
    if layers != draft.reads and min(layers) >= 0:
        says = f"the auxiliary layers were those of a head that names none: {', '.join(map(str, layers))}"
        yield Mistake("aux-layers-default", says, replace(draft, reads=layers))
    word = "ignored" if head.norm_output else "set"
    yield Mistake("norm-output", f"norm_output were {word}", _one(draft, replace(head, norm_output=not head.norm_output)))
    weights = dict(head.weights)
    if "input_norm.weight" in weights:
        del weights["input_norm.weight"]
        yield Mistake("norm-before-fc", "norm_before_fc were ignored", _one(draft, replace(head, weights=weights)))
    else:
        stored = {modern(name): tensor for name, tensor in checkpoint.tensors.items()}.get("input_norm.weight")
        if stored is not None:
            weights["input_norm.weight"] = stored.to(head.embedding)
            yield Mistake("norm-before-fc", "norm_before_fc were set", _one(draft, replace(head, weights=weights)))
    count = len(head.proposes)
    plain = torch.arange(count, device=head.proposes.device)
    for name, says, proposes in (
        ("d2t-missing", "d2t were missing", plain),
        ("d2t-absolute", "d2t held tokens, and not differences", head.proposes - plain),
        ("d2t-shifted", "d2t were one off", head.proposes + 1),
    ):
        proposes = proposes.clamp(0, len(head.embedding) - 1)
        if count < len(head.embedding) and not torch.equal(proposes, head.proposes):
            yield Mistake(name, says, _one(draft, replace(head, proposes=proposes)))


def _one(draft: DraftModel, head: Eagle3Head) -> DraftModel:
    return replace(draft, heads=(head,))


def _with_shape(draft: DraftModel, shape: LlamaShape) -> DraftModel:
    return replace(draft, heads=tuple(replace(head, shape=shape) for head in draft.heads))


# A head accepts clearly more in another reading if it does so by this many drafts a position, and by this many standard errors
# over texts: of a dozen readings, one of a healthy head gets there by chance once in a thousand pairs.
_MORE, _ERRORS = 0.05, 4.5
LEAST_TEXTS = 3  # of fewer the scatter says nothing


def is_clearly_more(as_it_says: Sequence[float], otherwise: Sequence[float]) -> bool:
    """Whether a head accepts clearly more in another reading: mean accepted drafts of each text, as it says and otherwise."""
    gain = np.array(otherwise) - np.array(as_it_says)
    if len(gain) < LEAST_TEXTS or gain.mean() < _MORE:
        return False
    error = gain.std(ddof=1) / len(gain) ** 0.5
    return bool(gain.mean() > _ERRORS * error)


# Answers that are looked at again for each mistake: of those that a mistake does not explain, few are needed.
_LOOKED_AT = 16
# Texts of a pair: each is followed once for each mistake.
_TEXTS = 40


def explained_by(pair: Pair, shape: Shape, seen: Sequence[Seen]) -> list[Mistake]:
    """The mistakes that explain every answer looked at, where some are not what the pair deserves."""
    unequal = [one for one in seen if not one.compared.equal]
    equal = [one for one in seen if one.compared.equal]
    left = _of(pair) if unequal else []
    for one in [*unequal[:_LOOKED_AT], *equal[:_LOOKED_AT]]:
        answer = one.sent.answer
        read = _reader(pair, (*answer.prompt, *answer.tokens))
        left = [
            mistake
            for mistake in left
            if compare(
                replace(pair, draft=mistake.draft, tie=one.compared.tie), shape, answer, read(mistake.draft.reads), one.ways
            ).equal
        ]
        if not left:
            break
    return left


def better_read_as(pair: Pair, shape: Shape, texts: Sequence[Text]) -> list[Mistake]:
    """The mistakes with which the head accepts clearly more on some texts."""
    if len(texts) < LEAST_TEXTS:
        return []
    some, possible = texts[:_TEXTS], _of(pair)
    as_it_says = [_mean_accepted(text.followed, text.begin) for text in some]
    otherwise: list[list[float]] = [[] for _ in possible]
    for text in some:
        read = _reader(pair, text.tokens)
        for mistake, found in zip(possible, otherwise, strict=True):
            mistaken = replace(pair, draft=mistake.draft)
            followed = mistaken.follow(text.tokens, read(mistake.draft.reads).hidden, shape)
            found.append(_mean_accepted(followed, text.begin))
    return [mistake for mistake, found in zip(possible, otherwise, strict=True) if is_clearly_more(as_it_says, found)]


def _of(pair: Pair) -> list[Mistake]:
    return mistakes(pair.draft, pair.of_draft, pair.of_target, pair.target.shared)


def _reader(pair: Pair, tokens: Sequence[int]) -> Callable[[States], Read]:
    """What the target makes of a text: most mistakes read the same states of it, which are kept for that text alone."""
    return cache(lambda reads: pair.target.read(tokens, reads))


def _mean_accepted(followed: Followed, begin: int) -> float:
    """Mean drafts that are accepted behind a prompt."""
    return float(np.mean(followed.accepted_everywhere[begin:-1]))
