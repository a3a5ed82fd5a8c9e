"""Record which tokens the grammars of a batch let a forward give: the mask that SGLang applies to its logits. Made by taps.py.

A mask is packed, 32 tokens to an integer. It has a row for each request of a prefill, and for each node of each tree of a
round; a batch without grammars has none.
"""

import importlib
import inspect
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import GrammarBackend
from eagletwin.harness.core.trace import snapshot

from ..blame import hand_on
from ..grammars import CLASSES

_APPLY = "apply_vocab_mask"


class Masks:
    """Watches from `start` to `stop`. vocabulary: the model's tokens; 0: the case has no grammars, and nothing is watched.
    backend: what makes the masks."""

    def __init__(self) -> None:
        self.vocabulary = 0
        self.backend: GrammarBackend = "xgrammar"
        self._owner: Any = None
        self._original: Any = None
        self._applied: Array | None = None

    def start(self) -> None:
        if not self.vocabulary:
            return
        module, owner = CLASSES[self.backend]
        self._owner = getattr(importlib.import_module(module), owner)
        self._original = inspect.getattr_static(self._owner, _APPLY)
        static = isinstance(self._original, staticmethod)
        call = self._original.__func__ if static else self._original

        def applied(*args: Any, **kwargs: Any) -> Any:
            self._applied = snapshot(kwargs["vocab_mask"] if "vocab_mask" in kwargs else args[-1])
            return hand_on(call, *args, **kwargs)

        setattr(self._owner, _APPLY, staticmethod(applied) if static else applied)

    def stop(self) -> None:
        if self._owner is not None:
            setattr(self._owner, _APPLY, self._original)
            self._owner = None

    def clear(self) -> None:
        """Before a forward whose logits tokens are chosen by."""
        self._applied = None

    def of(self, number: int, requests: int) -> dict[str, Array]:
        """What was applied to the rows of request `number` of so many: allowed [n, V], 1 for each token that may come. Empty
        where no mask was."""
        if self._applied is None:
            return {}
        bits = np.unpackbits(self._applied.view(np.uint8), axis=-1, bitorder="little")[:, : self.vocabulary]
        return {"allowed": bits.reshape(requests, -1, self.vocabulary)[number].copy()}
