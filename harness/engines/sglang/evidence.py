"""Which changed statements ran: those of a source tree (changes.py), and those of patches in memory (patches.py).

A CUDA graph is captured once for each batch size, and no Python runs in a replay. The statements that ran in its capture
count where it is replayed.
"""

from typing import Any

from .blame import hand_on

executed: set[str] = set()  # places of changed statements that ran, here or before the fork
captured: set[str] = set()  # those of them that ran in the capture of any graph

CALL = "_eagletwin_executed"  # the global by which changed code notes that it runs


def watch_graphs(graphs: Any) -> None:
    """Note which statements each graph of this class (torch.cuda.CUDAGraph) holds, and count them where it is replayed. Called
    before any is captured."""
    begin, end, replay = graphs.capture_begin, graphs.capture_end, graphs.replay
    before: set[str] = set()

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        hand_on(begin, self, *args, **kwargs)
        before.update(executed)
        executed.clear()

    def capture_end(self: Any) -> None:
        self.eagletwin_executed = frozenset(executed)
        captured.update(executed)
        executed.update(before)
        before.clear()
        hand_on(end, self)

    def noted_replay(self: Any) -> None:
        executed.update(self.eagletwin_executed)
        hand_on(replay, self)

    graphs.capture_begin, graphs.capture_end, graphs.replay = capture_begin, capture_end, noted_replay
