"""How close two logits may be before an engine of 16 bits decides between them: measured for each text, on the text itself.

In float32 one bound serves every pair. In 16 bits the logits of a head are off by percents, and by how much depends on the
weights: on how often a number is rounded, and on how sharply attention chooses. So the text is followed twice, with the weights
that the engine has: exactly (the target in float32, the head in float64), and with the target in the engine's own type and the
head rounded wherever an engine stores a number. An engine's roundings are others of the same kind, in the same sums.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.errors import HarnessError
from eagletwin.reference.everywhere import committed_everywhere

from .device import on
from .draft import DraftModel
from .follow import chain_logits
from .target import Target

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
