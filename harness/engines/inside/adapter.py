"""What the processes of an engine ask of the room that knows it: a module with these functions (`sglang/adapter.py`)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.records import EngineInfo, Jittered
from eagletwin.harness.core.trace import Recorder
from eagletwin.harness.engines.protocol import Build, Run
from eagletwin.harness.engines.triton_cpu import KernelViolation

Reached = Callable[[str], None]
Live = Callable[[int, Case], tuple[Case, bool]]


class EndlessCase(Exception):
    """The scheduler went on for more iterations than the case can need: it makes no progress."""


class Stopped(Exception):
    """The iteration was reached after which the case was to stop."""


class DrivenCase(Protocol):
    """A case on its way. case: with what came while it ran; jittered: where pauses fell, if there were to be some."""

    case: Case

    @property
    def jittered(self) -> Jittered | None: ...

    def run(self, fresh: bool = False) -> None:
        """Run the case to its end. Raises what the worker raises, EndlessCase or Stopped."""


class EngineAdapter(Protocol):
    """An engine. `worker` is what was built of a configuration, and runs its cases."""

    PACKAGE: str

    def start(self, build: Build, worker: Any) -> None:
        """Once in a process that runs cases, before the first: its kernels run as the build asks."""

    def clear(self) -> None:
        """Before each case: forget what the last one left in the adapter."""

    def drive(
        self, worker: Any, run: Run, recorder: Recorder, reached: Reached, live: Live | None, info: EngineInfo
    ) -> DrivenCase: ...

    def watch(self, worker: Any) -> AbstractContextManager[None]:
        """While a case runs."""

    def swallowed(self) -> str:
        """What the engine caught of the adapter's own exceptions, and so went on without; empty if nothing."""

    def faults(self) -> Sequence[KernelViolation]:
        """What kernels did in this case that they must not, even if the engine swallowed the exception."""
