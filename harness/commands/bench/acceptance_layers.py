"""What the live faults of multi-layer drafts cost (DESIGN 3.7): accept lengths with and without each, by the reference alone.

* `boundary`: rows that were fed a draft which verify rejected stay (`last_fed`), in place of what was committed (`committed`).
* `chunk tail`: at the end of a prefill chunk in between, layer 0's last row consumes the target's argmax and the layers above
  what those below proposed, in place of the prompt's tokens; with one token, layer 0's alone is right.

The same prompts serve both sides, some of them at a time: their differences show how far a cost differs from chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev
from typing import Literal

import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.eagle import Head
from eagletwin.reference.llama import target_rows
from eagletwin.reference.mtp import draft_extend
from eagletwin.reference.rows import DraftRows, behind

from .acceptance import greedy

SEEDS, PROMPTS, PROMPT_SIZE, NEW_TOKENS = 6, 8, 40, 24
MOST_STEPS = 4  # tokens computed behind those of a request, to judge its last drafts by

Tail = Literal["predicted", "one token", "all tokens"]


@dataclass(frozen=True, slots=True)
class FaultRuns:
    """One fault as two ways to run: how a chunk's last rows are fed, and whether rows keep rejected drafts; chunk 0: one."""

    name: str
    chunk: int
    wrong: tuple[Tail, bool]
    right: tuple[Tail, bool]


FAULTS = (
    FaultRuns("boundary KV", 0, ("all tokens", True), ("all tokens", False)),
    FaultRuns("chunk tail, chunks of 4", 4, ("predicted", True), ("all tokens", True)),
    FaultRuns("the same, with layer 0's token right", 4, ("one token", True), ("all tokens", True)),
    FaultRuns("chunk tail, chunks of 16", 16, ("predicted", True), ("all tokens", True)),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens committed a round, the bonus token counted: of each seed the mean with the fault (wrong) and without it (right).

    stale  share of the stored rows of layers 1.. that are not those of what was committed, at the end of the requests with it
    """

    model: str
    num_steps: int
    fault: FaultRuns
    wrong: tuple[float, ...]
    right: tuple[float, ...]
    stale: float

    @property
    def costs(self) -> list[float]:
        """Of each seed: the share of the tokens a round that the fault loses."""
        return [1 - wrong / right for wrong, right in zip(self.wrong, self.right, strict=True)]

    @property
    def cost(self) -> float:
        return fmean(self.costs)

    @property
    def spread(self) -> float:
        """Standard deviation of the costs of the seeds."""
        return stdev(self.costs) if len(self.costs) > 1 else 0.0


def layers_cost(
    model: str, num_steps: int, fault: FaultRuns, seeds: int = SEEDS, prompts: int = PROMPTS, new_tokens: int = NEW_TOKENS
) -> Cost:
    """Measure one fault in one model with num_steps layers."""
    recipe, pair = RECIPES[model], model_pair(model)
    heads = pair.reference_heads(recipe)[:num_steps]
    wrong, right, stale = [], [], []
    for seed in range(seeds):
        found: dict[bool, list[int]] = {True: [], False: []}
        for tokens, hidden, predicted in _requests(model, seed, prompts, new_tokens):
            for faulty, way in ((True, fault.wrong), (False, fault.right)):
                request = _Request(heads, recipe.chained, tokens, hidden, predicted, *way)
                found[faulty] += request.run(PROMPT_SIZE, new_tokens, fault.chunk or PROMPT_SIZE)
                if faulty:
                    stale.append(request.stale())
        wrong.append(fmean(found[True]))
        right.append(fmean(found[False]))
    return Cost(model, num_steps, fault, tuple(wrong), tuple(right), fmean(stale))


@lru_cache(maxsize=4 * SEEDS)
def _requests(model: str, seed: int, prompts: int, new_tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each request: tokens [T], the target's hidden states [T, H], and what it says behind each token [T]."""
    recipe, weights = RECIPES[model], model_pair(model).reference_target()
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(prompts):
        prompt = torch.randint(0, recipe.target.vocab_size, (PROMPT_SIZE,), generator=generator)
        tokens = greedy(model, prompt, new_tokens + MOST_STEPS + 2)
        rows = target_rows(weights, recipe.target, tokens)
        found.append((tokens, rows.hidden, rows.logits.argmax(-1)))
    return found


class _Request:
    """One request of the reference, of which every token is known beforehand.

    tokens [T]; hidden [T, H] of the target; predicted [T]: what it says behind each; keep: rows stay as they were fed.
    """

    def __init__(
        self, heads: Sequence[Head], chained: bool, tokens: Tensor, hidden: Tensor, predicted: Tensor, tail: Tail, keep: bool
    ) -> None:
        self._heads, self._chained, self._tokens, self._hidden = heads, chained, tokens, hidden
        self._predicted, self._tail, self._keep = predicted, tail, keep
        self._stored: list[DraftRows | None] = [None] * len(heads)
        self._end = 0  # rows that are stored

    def run(self, size: int, new_tokens: int, chunk: int) -> list[int]:
        """Accept lengths of the rounds that commit `new_tokens` tokens behind a prompt of `size` in chunks."""
        end, lengths = 0, []
        while end + chunk < size:
            end += chunk
            self._extend(end, self._known(end, size))
        end = size
        while end < size + new_tokens:
            drafted = self._extend(end, self._tokens[: end + 1])
            accepted = next((n for n, token in enumerate(drafted) if token != self._tokens[end + 1 + n]), len(drafted))
            lengths.append(accepted + 1)
            end += accepted + 1
        return lengths

    def _known(self, end: int, size: int) -> Tensor:
        """The tokens that the layers are given at the end of a chunk in between."""
        if self._tail == "all tokens":
            return self._tokens[:size]
        following = self._predicted[end - 1 : end] if self._tail == "predicted" else self._tokens[end : end + 1]
        return torch.cat([self._tokens[:end], following])

    def _extend(self, end: int, known: Tensor) -> list[int]:
        """Store rows up to `end`, or all of them anew if none is kept as it was; what each layer proposes."""
        begin = self._end if self._keep else 0
        before = self._stored if self._keep else [None] * len(self._heads)
        layers = draft_extend(self._heads, self._chained, known, self._hidden, range(begin, end), before)
        self._stored = [behind(old, new) for old, new in zip(before, layers, strict=True)]
        self._end = end
        return [int(layer.logits[-1].argmax()) for layer in layers]

    def stale(self) -> float:
        """Share of the stored rows of layers 1.. that are not what they are once all tokens are known."""
        layers = len(self._heads)
        whole = draft_extend(self._heads, self._chained, self._tokens, self._hidden, range(self._end), [None] * layers)
        wrong = 0
        for stored, pure in zip(self._stored[1:], whole[1:], strict=True):
            assert stored is not None
            wrong += int(((stored.values - pure.values).abs().amax((0, 2, 3)) > 1e-9).sum())
        return wrong / max(1, self._end * (layers - 1))
