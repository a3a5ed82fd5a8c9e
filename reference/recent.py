"""What draft decode reads of the committed prefix: all of it, or its first rows and its last (StreamingLLM).

Source: StreamingLLM (arXiv 2309.17453) §3.2, which keeps the first rows, the *sink*, and a window of the newest. A draft that
is told to read no more of its prefix drafts faster in a long context. Only draft decode is cut: committed rows are computed
over the whole prefix, and so is what the target verifies. That the window is of committed rows alone, and that the rows of the
same round are read beside it, is SGLang's (--speculative-draft-window-size, --speculative-draft-sink-size).
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Recent:
    """The first `sink` rows of a prefix and the last `window`; all of it where window is 0."""

    window: int = 0
    sink: int = 0

    def of(self, positions: Tensor, prefix: Tensor | int) -> Tensor:
        """Which rows at these positions a round reads whose prefix has so many: bool, of the two's common shape."""
        if not self.window:
            return positions < prefix
        return (positions < prefix) & ((positions < self.sink) | (positions >= prefix - self.window))


WHOLE = Recent()
