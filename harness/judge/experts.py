"""Choices of experts, and of rows by an indexer: which tie, and which of the trace the reference follows where rounding admits
them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.families.recipe import Recipe
from eagletwin.reference.eagle import Head
from eagletwin.reference.experts import BIAS, CHOSEN, WITHIN
from eagletwin.reference.sizes import LlamaShape

from .bounds import Bounds, index_within

# Choices of experts that tie. An engine's rounding decides them, and all numbers of such a row follow from what it decided.
#
# Where a number is wrong in a model with experts, the judge asks the reference again: first with the experts that the trace
# says each row went to, where it says so. In a CUDA graph nobody sees a router; then, and where the first did not
# help, the bias of one expert is a little larger: that expert then wins each tie that it has lost by less. DeepSeek's bias is
# in the choice alone, and in no number; gpt-oss' is in the weights of the chosen as well, where so little is within the bound.
# If everything is right then, the engine decided a tie the other way. Called by judge.py.

_ROUTER, _BIASED_ROUTER = "mlp.gate.weight", "mlp.router.bias"
# A rule of these compares numbers that follow from a choice of experts; others compare integers, or what comes before it.
_OF_TARGET = ("target.", "commit.path", "output.", "verify.")
_OF_DRAFT = ("draft.hidden_in", "draft.kv", "draft.scratch_kv", "draft.selection", "draft.proposal", "tree.")


@dataclass(frozen=True, slots=True)
class Nudge:
    """In all layers with experts, of the target or of the draft, the bias of one expert is larger by `size`.

    A model without biases gets some, which are zero but for this one.
    """

    part: Literal["target", "draft"]
    expert: int
    size: float

    def of(self, part: Literal["target", "draft"], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of that part with it."""
        found = dict(weights)
        for name in weights if part == self.part else ():
            if name.endswith(_BIASED_ROUTER):
                found[name] = weights[name].clone()
                found[name][self.expert] += self.size
            elif name.endswith(_ROUTER):
                router, bias = weights[name], name.removesuffix("weight") + BIAS
                found[bias] = weights[bias].clone() if bias in weights else router.new_zeros(len(router))
                found[bias][self.expert] += self.size
        return found


def follows_from_experts(rule: str) -> bool:
    """Whether what this rule compares follows from numbers of rows that went to experts."""
    return rule.startswith((*_OF_TARGET, *_OF_DRAFT))


# How ties in choices of experts are decided: by a nudge; as the trace has it, last or in this life; or as they are (None)
Ties = Nudge | Literal["as the trace"] | int | None


def nudges(recipe: Recipe, rule: str, bounds: Bounds) -> Iterator[Nudge]:
    """What may have been decided otherwise where this rule is broken first, the smallest first; none where no row chooses.

    What experts are ranked by (an affinity and its bias, or a router's logit) is of the size of one, and two of them may each
    be off by the bound, as two logits.
    """
    of_parts: tuple[tuple[Literal["target", "draft"], LlamaShape, tuple[str, ...]], ...]
    of_parts = (("target", recipe.target, _OF_TARGET), ("draft", recipe.draft, _OF_DRAFT))
    for part, shape, rules in of_parts:
        if not shape.chooses or not rule.startswith(rules):
            continue
        for size in (bounds.tie / 100, bounds.tie / 10, bounds.tie):  # the nearest tie alone, if it is enough
            for expert in range(shape.routed):
                yield Nudge(part, expert, size)


# Which experts each row went to by the trace, and which rows it attended to where an indexer chooses, for the reference to
# follow where rounding admits them.
#
# A row's choices are those of the forward that computed it last. Of a row that came from the prefix cache they are those of the
# request that computed it. A retraction ends a life of its request, whose rows are computed again in the next: the reference
# then follows one life, in which a row that was computed earlier alone is as it was. Called by replay.py.

_ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
_INDEXER = "indexer.wk.weight"
_PREFILLS = ("target.extend", "draft.extend")
Choice = dict[str, Array]  # of one row: `experts` [layers, K], `chosen` rows [layers, K] by position, -1 behind them


@dataclass(slots=True)
class RoutedRows:
    """Choices of the committed rows of a target or a draft, in one life of each request.

    own  by request and row; by_prefix: by the tokens that a row has seen
    """

    own: dict[tuple[str, int], Choice] = field(default_factory=dict)
    by_prefix: dict[int, Choice] = field(default_factory=dict)

    def of(self, request: str, prefixes: Sequence[int]) -> list[Choice | None]:
        """Of the rows that have seen these prefixes; None where nobody says it."""
        return [self.own.get((request, row), self.by_prefix.get(prefix)) for row, prefix in enumerate(prefixes)]


@dataclass(slots=True)
class Routed:
    """What the rows of a trace went to.

    within  how far off the difference of two scores of experts may be, as a share of the largest; index_within: index scores
    steps   choices of each of draft decode's rows, by request, round and step
    again   requests of which a row was computed twice, and made other choices: no one reference has both
    lives   iterations in which each request's rows began to be computed again
    """

    within: float
    index_within: tuple[float, float, float]
    rows: dict[str, RoutedRows]
    steps: dict[tuple[str, int, int], list[Choice]]
    again: set[str]
    lives: dict[str, list[int]]

    def target(self, weights: Mapping[str, Tensor], shape: LlamaShape, replays: Sequence[Any]) -> Mapping[str, Tensor]:
        """The target's weights, with what rows 0..T-2 of each replay went to."""
        found = [at for replay in replays for at in self.rows["target"].of(replay.name, _prefixes(replay.tokens)[:-1])]
        return self._with(weights, shape, found)

    def draft(self, head: Head, replays: Sequence[Any], lengths: Sequence[int]) -> Head:
        """The head, with what its committed rows went to: so many of each replay."""
        found: list[Choice | None] = []
        for replay, length in zip(replays, lengths, strict=True):
            found += self.rows["draft"].of(replay.name, _prefixes(replay.tokens)[head.ahead :][:length])
        return replace(head, weights=self._with(head.weights, head.shape, found))

    def decode(self, head: Head, rounds: Sequence[tuple[str, int]], steps: int, topk: int) -> list[Head]:
        """The head of each step of these rounds (request, round), with what that step's rows went to."""
        heads = []
        for step in range(1, steps):
            found: list[Choice | None] = []
            for request, number in rounds:
                chosen = self.steps.get((request, number, step))
                found += [None] * topk if chosen is None or len(chosen) != topk else list(chosen)
            heads.append(replace(head, weights=self._with(head.weights, head.shape, found)))
        return heads

    def _with(self, weights: Mapping[str, Tensor], shape: LlamaShape, found: Sequence[Choice | None]) -> dict[str, Tensor]:
        kind, given = shape.experts or shape.clamped, dict(weights)
        if kind is not None:
            routers = [name.removesuffix("weight") for name in weights if name.endswith(_ROUTERS)]
            experts = [None if row is None else row.get("experts") for row in found]
            given |= _of_layers(routers, experts, (kind.chosen, 0, kind.count), torch.tensor(self.within, dtype=torch.float64))
        if shape.index is not None:
            indexers = [name.removesuffix("wk.weight") for name in weights if name.endswith(_INDEXER)]
            rows = [None if row is None else row.get("chosen") for row in found]
            within = torch.tensor(self.index_within, dtype=torch.float64)
            given |= _of_layers(indexers, rows, (shape.index.chosen, -1, 1 << 31), within)
        return given


def _of_layers(
    prefixes: list[str], found: Sequence[Array | None], limits: tuple[int, int, int], within: Tensor
) -> dict[str, Tensor]:
    """What was chosen in each of these layers, and within what: weights by name. limits: how many are chosen, and from which
    number to below which. What does not fit counts as not known."""
    if not prefixes:
        return {}
    prefixes = sorted(prefixes, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])
    count, least, most = limits
    whole = (len(prefixes), count)
    unknown = np.full(whole, -1, np.int64)
    fits = [at if at is not None and at.shape == whole and at.min() >= least and at.max() < most else unknown for at in found]
    chosen = torch.from_numpy(np.array(fits, np.int64).reshape(-1, *whole))  # [R, layers, K]
    of_layer = {f"{prefix}{CHOSEN}": chosen[:, layer] for layer, prefix in enumerate(prefixes)}
    return of_layer | {f"{prefix}{WITHIN}": within for prefix in prefixes}


def routed_of(trace: Trace, replays: Mapping[str, Any], bounds: Bounds, ahead: int, life: int | None = None) -> Routed:
    """What a trace says, by the end of each request's life of this number; None: of its last."""
    within, most = index_within(bounds, trace.header.engine.device), len(trace.header.records) if life is None else life
    found = Routed(bounds.tie, within, {"target": RoutedRows(), "draft": RoutedRows()}, {}, set(), {})
    computed = dict[tuple[str, int], int]()  # the life in which a row of the target was computed last, by request and row
    of_stories = {name: _prefixes(replay.tokens) for name, replay in replays.items()}
    for number, record in enumerate(trace.header.records):
        names = [name for name in ("experts", "chosen") if name in record.tensors]
        if not names or record.request not in replays:
            continue
        by_row = [trace.array(number, name) for name in names]
        chosen = [dict(zip(names, row, strict=True)) for row in zip(*by_row, strict=False)]
        replay = replays[record.request]
        if record.stage == "draft.decode":
            found.steps[record.request, record.round, record.step] = chosen
            continue
        if record.stage == "draft":  # its steps ran in a graph
            found.steps |= {(record.request, record.round, step): [row] for step, row in enumerate(chosen, 1)}
            continue
        part, seen = ("target", 0) if record.stage.startswith("target.") else ("draft", ahead)
        prefixes, rows = of_stories[record.request][seen:], found.rows[part]
        own = [
            pair for pair in committed_rows(record, replay, len(chosen)) if pair[0] < len(prefixes) and pair[1] < len(chosen)
        ]
        lives = found.lives.setdefault(record.request, [])
        if record.stage == _PREFILLS[0] and any(computed.get((record.request, row)) == len(lives) for row, _ in own):
            lives.append(record.iteration)
        for row, index in own:
            before = rows.own.get((record.request, row), chosen[index])
            if any(not np.array_equal(before[name], chosen[index][name]) for name in names if name in before):
                found.again.add(record.request)
            if part == "target":
                computed[record.request, row] = len(lives)
            if len(lives) <= most or (record.request, row) not in rows.own:
                rows.own[record.request, row] = chosen[index]
            if len(lives) <= most or prefixes[row] not in rows.by_prefix:
                rows.by_prefix[prefixes[row]] = chosen[index]
    return found


def is_dense(trace: Trace, number: int, count: int) -> bool:
    """Whether a forward needs no choice of rows and has none: in bfloat16 a prefill attends to all rows of a text that has no
    more than `count`, the number that is chosen."""
    record = trace.header.records[number]
    if "chosen" in record.tensors or record.stage not in _PREFILLS or trace.header.engine.dtype != "bfloat16":
        return False
    return record.step + len(trace.array(number, "input_ids")) <= count


def committed_rows(record: Record, replay: Any, count: int) -> Iterator[tuple[int, int]]:
    """Which committed rows a forward computed, and which of its own rows each is."""
    if record.stage in _PREFILLS:
        yield from ((record.step + index, index) for index in range(count))
    elif record.round < len(replay.rounds):
        round = replay.rounds[record.round]
        path = round.path if record.stage == "target.verify" else range(round.end - round.committed)
        yield from ((round.committed + n, index) for n, index in enumerate(path) if index >= 0)


def _prefixes(tokens: Sequence[int]) -> list[int]:
    """Of each position a number for the tokens up to it."""
    found, last = [], 0
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found
