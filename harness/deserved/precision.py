"""A target and its draft, both loaded, and how close two of their logits may be before an engine of 16 bits decides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.errors import HarnessError, InputError
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.reference.everywhere import committed_everywhere

from .checkpoint import Checkpoint, checkpoint
from .draft import DraftModel, layers_in_vllm, on, read_draft, round_weights
from .follow import Followed, Shape, chain_logits, follow_chains, follow_last_fed, follow_trees
from .server import Started
from .target import Read, Served, Target

# How close two logits may be before an engine of 16 bits decides between them: measured for each text, on the text itself.
#
# In float32 one bound serves every pair. In 16 bits the logits of a head are off by percents, and by how much depends on the
# weights: on how often a number is rounded, and on how sharply attention chooses. So the text is followed twice, with the
# weights that the engine has: exactly (the target in float32, the head in float64), and with the target in the engine's own
# type and the head rounded wherever an engine stores a number. An engine's roundings are others of the same kind, in the same
# sums.

# Tokens of a row whose differences are measured: a choice is between neighbours at its top.
_BEST = 8
# A band of six standard deviations; and of half as much again as the largest difference, where some rows are rougher than the
# others: of two samples of hundreds of rows, one's largest difference is rarely so much larger than the other's.
_DEVIATIONS, _MARGIN = 6.0, 1.5

# What an engine stores: results of linear layers, norms, RoPE, attention's weights and output, activations, sums. The scores of
# attention, the first of its two products, stay in the float32 that kernels accumulate in.
_STORED = {"mm", "addmm", "add", "mul", "sub", "_softmax", "silu"}


class Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, and on, results that an engine stores are rounded to its type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype, self._products, self.on = dtype, 0, True

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest number of the type, in the type that x has."""
        return x.to(self._dtype).to(x.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "bmm":
            self._products += 1
        stored = name in _STORED or (name == "bmm" and self._products % 2 == 0)
        if self.on and stored and isinstance(result, Tensor) and result.dtype in (torch.float64, torch.float32):
            return self.nearest(result)
        return result


@dataclass(frozen=True, slots=True)
class Precision:
    """An engine's type.

    target  the target in that type, as transformers runs it; draft: the head, with weights of that type
    """

    dtype: torch.dtype
    target: Target
    draft: DraftModel

    def tie(self, tokens: Sequence[int], hidden: Tensor, num_steps: int) -> float:
        """Two logits of a row are too close to tell if they differ by less than this share of its largest.

        hidden [n, ..]: the exact states. Raises HarnessError where the type cannot hold what the target computes.
        """
        ids = torch.tensor(list(tokens), device=hidden.device)
        rough = self.target.read(tokens, self.draft.reads).hidden
        kind = self.draft.heads[0].embedding.dtype
        exact = [logits for _, logits in chain_logits(self.draft, ids, hidden.to(kind), num_steps)]
        with Rounding(self.dtype):
            rounded = [logits for _, logits in chain_logits(self.draft, ids, rough.to(kind), num_steps)]
        largest, squares, count = 0.0, 0.0, 0
        for one, other in zip(exact, rounded, strict=True):
            share = _errors(one.flatten(0, 1), other.flatten(0, 1))
            # of all differences of two: their mean square is twice the variance
            squares += float(2 * share.var(-1).sum())
            largest = max(largest, float((share.amax(-1) - share.amin(-1)).max()))
            count += len(share)
        band = max(_DEVIATIONS * math.sqrt(squares / count), _MARGIN * largest)
        if not band < math.inf:
            raise HarnessError(
                f"in {str(self.dtype).removeprefix('torch.')} this pair computes numbers that are not finite",
                consequence="it is not known what an engine of that type drafts",
                remedy="serve it in another type: SGLang's --dtype",
            )
        return band

    def rows(self, tokens: Sequence[int], exact: Array) -> float:
        """How far off a stored row may be, as a share of its largest number. exact: as `stored_rows` has them."""
        rough = self.target.read(tokens, self.draft.reads).hidden
        with Rounding(self.dtype):
            share = off_by(exact, stored_rows(self.draft, tokens, rough))
        return max(_DEVIATIONS * float(np.sqrt((share**2).mean())), _MARGIN * float(share.max()))


def stored_rows(draft: DraftModel, tokens: Sequence[int], hidden: Tensor) -> Array:
    """The KV rows of a head along a text of n tokens [n - 1, 2, L, G, D]. hidden [>= n - 1, ..]"""
    head, ids = draft.heads[0], torch.tensor(list(tokens), device=hidden.device)
    with torch.no_grad(), on(hidden.device):
        rows = committed_everywhere(head, ids, hidden.to(head.embedding.dtype))
    assert rows is not None
    found: Array = torch.stack([rows.keys, rows.values]).permute(2, 0, 1, 3, 4).cpu().numpy()
    return found


def off_by(exact: Array, stored: Array) -> Array:
    """How far off each row's keys and values are, of each layer [n, 2, L], as a share of the largest number of them."""
    size = np.abs(exact).max((3, 4))
    off: Array = np.abs(stored.astype(np.float64) - exact).max((3, 4)) / np.maximum(size, 1e-30)
    off[~np.isfinite(stored).all((3, 4))] = np.inf
    return off


def _errors(exact: Tensor, rounded: Tensor) -> Tensor:
    """How far off the best logits of each row are, as a share of its largest. [R, V] twice -> [R, 8]."""
    size = torch.where(exact.isinf(), 0, exact).abs().amax(-1, keepdim=True)
    best = exact.topk(min(_BEST, int(exact.isfinite().sum(-1).min()))).indices
    return (rounded.gather(1, best) - exact.gather(1, best)) / size


# A target and its draft, both loaded: what is asked of them is how a text goes on, and what is accepted along it.


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
        pair = load_pair(target, draft, "float32", device, dtype)
        return replace(pair, draft=_read_by(started, pair.draft, of_draft, pair.target))
    of_weights, of_head = (getattr(torch, name) for name in served)
    loaded = Target(of_target, "float32", device, of_weights)
    head = round_weights(_read_by(started, read_draft(of_draft, loaded.shared, dtype), of_draft, loaded), of_head)
    precision = Precision(of_head, Target(of_target, served[0], device), head)
    return Pair(loaded, head, of_target, of_draft, precision=precision)


def _read_by(started: Started, draft: DraftModel, checkpoint: Checkpoint, target: Target) -> DraftModel:
    """The draft as the server's engine reads its configuration."""
    if started.engine == "sglang" or draft.algorithm != "EAGLE3":
        return draft
    return replace(draft, reads=layers_in_vllm(checkpoint.config, target.shared.num_layers))
