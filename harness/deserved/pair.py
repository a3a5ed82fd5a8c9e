"""A target and its draft, both loaded: what is asked of them is how a text goes on, and what is accepted along it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.judge.bounds import FLOAT32

from .checkpoint import Checkpoint, checkpoint
from .draft import DraftModel, read_draft, rounded
from .follow import Followed, Shape, follow_chains, follow_last_fed, follow_trees
from .precision import Precision
from .server import Started
from .target import Read, Served, Target


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair in memory, the two checkpoints that it was read from, and how close two logits may be before an engine's precision
    decides.

    tie        two logits of a row that differ by less, as a share of its largest, are too close to tell
    precision  the engine's type, if it has 16 bits: what is too close to tell is measured on each text then
    """

    target: Target
    draft: DraftModel
    of_target: Checkpoint
    of_draft: Checkpoint
    tie: float = FLOAT32.tie
    precision: Precision | None = None

    def must_draft(self, shape: Shape) -> None:
        """Raises InputError for a shape that this draft does not have."""
        layers = self.draft.layers
        if layers and (shape.topk > 1 or shape.num_steps > layers):
            raise InputError(
                f"the draft has {layers} layers, of which each proposes one token, and num_steps {shape.num_steps} with topk "
                f"{shape.topk} was asked for",
                consequence="what it deserves then is not worked out",
                remedy=f"ask for at most {layers} steps and topk 1",
            )
        if self.precision is not None and layers > 1 and shape.num_steps > 1:
            raise InputError(
                "the server computes in 16 bits, with a draft of several layers",
                consequence="its layers are fed refused drafts, of which rounding decides some, and nobody tells which",
                remedy="serve the pair in float32 (--dtype float32), or record the server (eagletwin record): rules that need "
                "no weights judge it",
            )

    def read(self, tokens: Sequence[int], temperature: float = 0.0) -> Read:
        """What the target makes of a text."""
        return self.target.read(tokens, self.draft.reads, temperature)

    def on(self, tokens: Sequence[int], read: Read, shape: Shape) -> "Pair":
        """The pair with what is too close to tell on this text."""
        if self.precision is None:
            return self
        return replace(self, tie=self.precision.tie(tokens, read.hidden, shape.num_steps))

    def off_target(self, read: Read, begin: int) -> int:
        """Of the tokens of a text from x[begin] on, how many the target itself would clearly not say."""
        return int((read.lead[begin - 1 : -1] > self.tie).sum())

    def follow(self, tokens: Sequence[int], hidden: Tensor, shape: Shape) -> Followed:
        """Which drafts are accepted along a text, as it should be. hidden: of `read`."""
        if shape.topk > 1:
            return follow_trees(self.draft, tokens, hidden, shape, self.tie, "true_tree")
        return follow_chains(self.draft, tokens, hidden, shape.num_steps, self.tie)

    def follow_layout(
        self,
        tokens: Sequence[int],
        hidden: Tensor,
        shape: Shape,
        begin: int,
        starts: Sequence[int] | None = None,
        cuts: Sequence[int] = (),
    ) -> Followed | None:
        """The same as SGLang's layout of drafted rows has it (DESIGN 3.4, 3.7); None where it makes no difference.

        begin: the first token that was emitted; starts: M of the rounds that an engine made, if they are known; cuts: where
        chunks of the prompt ended in front of its end, which several layers look ahead of.
        """
        if shape.topk > 1 and shape.num_steps > 2:
            return follow_trees(self.draft, tokens, hidden, shape, self.tie, "slot_layout")
        if self.draft.layers > 1 and shape.num_steps > 1:
            return follow_last_fed(self.draft, tokens, hidden, begin, shape.num_steps, self.tie, starts, cuts)
        return None


def load_pair(target: str, draft: str, served: Served, device: str, dtype: torch.dtype = torch.float64) -> Pair:
    """The pair of two checkpoints; the head in `dtype`. Raises InputError for checkpoints that are no pair."""
    of_target, of_draft = checkpoint(target), checkpoint(draft)
    loaded = Target(of_target, served, device)
    return Pair(loaded, read_draft(of_draft, loaded.shared, dtype), of_target, of_draft)


def load_served(target: str, draft: str, started: Started, device: str, dtype: torch.dtype = torch.float64) -> Pair:
    """The pair as a server has it: the weights of its type, computed with exactly; and how its type rounds.

    Raises InputError for checkpoints that are no pair, and for a server that quantizes.
    """
    of_target, of_draft = checkpoint(target), checkpoint(draft)
    served = started.computes_in(of_target.config), started.computes_in(of_draft.config)
    if served == ("float32", "float32"):
        return load_pair(target, draft, "float32", device, dtype)
    of_weights, of_head = (getattr(torch, name) for name in served)
    loaded = Target(of_target, "float32", device, of_weights)
    head = rounded(read_draft(of_draft, loaded.shared, dtype), of_head)
    precision = Precision(of_head, Target(of_target, served[0], device), head)
    return Pair(loaded, head, of_target, of_draft, precision=precision)
