"""One layer of an MTP draft: as MiMo-V2 and Step-3.5 have it, and as DeepSeek-V3's NextN layer is (DESIGN 3.7).

Row i of layer k consumes (token x[i+1+k], hidden) at position i, as mtp.py says: embedding and hidden state are normalized,
each by a norm of its own, and joined; a decoder layer follows, a final norm and the LM head. Source: DeepSeek-V3 (arXiv
2412.19437) §2.2, equations 21-23, which write the hidden state first in the concatenation and have no norm before the LM head.
Embedding first, and that norm, are the implementations'.

The state that a chained layer hands on is the one before the final norm: that is Step-3.5's (vLLM, NeMo). DeepSeek's and GLM's
layers hand on the normed state (`normed`).

Differences to an EAGLE-1/2 head: those three norms, an input norm before attention, and which state is handed on.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .llama import decoder_layer, in_window
from .norm import Weights, rms_norm
from .rows import DraftRows
from .sizes import LlamaShape


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A head with the target's embedding and LM head.

    weights  float64: `enorm.weight [H]`, `hnorm.weight [H]`, `eh_proj.weight [H, 2H]` (embedding first), `layers.0.…`,
             `norm.weight [H]`
    embedding [V, H] and lm_head [V, H] of the target
    normed   what is handed on is the state after the final norm
    """

    weights: Weights
    shape: LlamaShape
    embedding: Tensor
    lm_head: Tensor
    normed: bool = False
    ahead: ClassVar[int] = 1  # row i consumes x[i+1]
    moves: ClassVar[bool] = True  # each step stands one position on

    def feed(self, hidden: Tensor) -> Tensor:
        """What committed rows consume: the state that the target hands over [R, H], as it is."""
        return hidden

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, before: DraftRows | None) -> DraftRows:
        """See draft_rows."""
        eps = self.shape.rms_norm_eps
        embedded = rms_norm(self.embedding[tokens], self.weights["enorm.weight"], eps)  # [R, H]
        normed = rms_norm(hidden, self.weights["hnorm.weight"], eps)  # [R, H]
        x = torch.cat([embedded, normed], -1) @ self.weights["eh_proj.weight"].T  # [R, H]
        stored = None if before is None else (before.keys[0], before.values[0])
        within = in_window(sees, self.shape.window(0))
        x, key, value = decoder_layer(self.weights, "layers.0.", self.shape, x, positions, within, before=stored)
        last = rms_norm(x, self.weights["norm.weight"], eps)  # [R, H]
        return DraftRows(last if self.normed else x, last @ self.lm_head.T, key[None], value[None])
