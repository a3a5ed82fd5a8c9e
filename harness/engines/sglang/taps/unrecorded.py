"""Taps that follow a run and record nothing of it: what recording costs is the difference (`speed` of tests/lab), and with
nothing that waits for a GPU its streams may race (jitter.py)."""

from typing import Any

import numpy as np
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import GrammarBackend

from .inner import Inner
from .pools import Allocation
from .taps import Taps
from .wraps import Around, Wraps


class _Blind(Allocation):
    """Looks at no slot."""

    def free(self) -> Array:
        return np.empty(0, np.int64)

    def used(self, free: Array) -> Array:
        return free


class _NoInner(Inner):
    def wrap(self, wraps: Wraps) -> None:
        pass


class Unrecorded(Taps):
    """Knows the requests and the prefills, as a run needs them."""

    allocates: type[Allocation] = _Blind
    inner = _NoInner
    records = False
    poisons = False

    def _record_owners(self) -> None:
        pass

    def _after_prefill(
        self, next_tokens: Tensor, draft_input: Any, starts: list[int], lengths: list[int], running: set[str]
    ) -> None:
        pass

    def _after_extend(self, result: Any, batch: Any) -> None:
        pass

    def _around_draft(self, call: Around, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return call(batch, *args, **kwargs)

    _around_verify = _around_draft


class Unwaited(Unrecorded):
    """Taps that wait for the GPU nowhere: a race between its streams is left to run. What draws coins and what applies grammars
    is not watched, and free slots are not poisoned while a case runs."""

    poisons = True

    def watch_coins(self) -> None:
        pass

    def watch_masks(self, vocabulary: int, backend: GrammarBackend) -> None:
        pass
