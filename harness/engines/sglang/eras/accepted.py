"""Which nodes verify accepted. From 0.5.21 on its result says so; before that only what samples inside it does.

0.5.14 to 0.5.20 sample with eagle_sample, which the modules of the workers import by name; up to 0.5.13 it is a method of the
verify input.
"""

import sys
from collections.abc import Callable
from typing import Any

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.errors import not_seen
from eagletwin.harness.core.trace import snapshot

from ..blame import hand_on


class Accepted:
    """Watches the sampling of one scheduler's verify from `start` to `stop`."""

    def __init__(self) -> None:
        from sglang.srt.managers.utils import GenerationBatchResult

        self._in_result = hasattr(GenerationBatchResult(), "accept_index")
        self.watching = True  # else a verify is let pass: whoever listens to some batches alone turns it off between them
        self._last: Array | None = None
        self._wrapped: list[tuple[Any, str, Callable[..., Any]]] = []

    def start(self) -> None:
        if self._in_result:
            return
        for owner, name in _samplers():
            original = getattr(owner, name)
            self._wrapped.append((owner, name, original))
            setattr(owner, name, self._around(original))

    def stop(self) -> None:
        for owner, name, original in self._wrapped:
            setattr(owner, name, original)
        self._wrapped.clear()

    def index(self, result: Any) -> Array:
        """Of verify's result [n, num_steps + 1]: nodes as numbers in the whole batch, -1 behind the last accepted one."""
        if self._in_result:
            return snapshot(result.accept_index)
        if self._last is None:
            raise not_seen("verify returned, and nothing has sampled")
        last, self._last = self._last, None
        return last

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(*args: Any, **kwargs: Any) -> Any:
            predicted, accept_lens, accept_index = hand_on(original, *args, **kwargs)
            if self.watching:
                self._last = snapshot(accept_index)
            return predicted, accept_lens, accept_index

        return sample


def _samplers() -> list[tuple[Any, str]]:
    """Everything through which a worker reaches what samples: (owner, name of its attribute)."""
    speculative = "sglang.srt.speculative."
    found = [(module, "eagle_sample") for name, module in sys.modules.items() if name.startswith(speculative)]
    found = [(module, name) for module, name in found if name in vars(module)]
    if not found:
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        found = [(owner, "sample") for owner in EagleVerifyInput.__mro__ if "sample" in vars(owner)][:1]
    if not found:
        raise not_seen("no function of this SGLang samples after a verify")
    return found
