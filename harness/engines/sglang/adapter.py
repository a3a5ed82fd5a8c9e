"""What the processes of SGLang's engines ask of this room (engines/inside/adapter.py)."""

from contextlib import AbstractContextManager
from typing import Any

from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.trace import Recorder
from eagletwin.harness.engines.inside import violations
from eagletwin.harness.engines.inside.adapter import Live, Reached
from eagletwin.harness.engines.protocol import Build, Run

from . import kernels
from .drive import Drive
from .graphs import streams
from .stand_ins import stubs

PACKAGE = "sglang"


def start(build: Build, worker: Any) -> None:
    kernels.start(build, worker)


def clear() -> None:
    kernels.clear()
    stubs.called.clear()


def drive(worker: Any, run: Run, recorder: Recorder, reached: Reached, live: Live | None, info: EngineInfo) -> Drive:
    driven = Drive(worker, run.case, recorder, reached, run.until, live, jitter=run.jitter, info=info)
    driven.send(run.sends)
    return driven


def watch(worker: Any) -> AbstractContextManager[None]:
    return streams.watch(worker)


def swallowed() -> str:
    """SGLang swallowed the exception, and so skipped a kernel."""
    return f"stub {stubs.called[0]} was called and the exception swallowed" if stubs.called else ""


def find_violation(where: str) -> Ending | None:
    return kernels.find_violation(where)


def fallbacks() -> tuple[str, ...]:
    return violations.fallbacks()
