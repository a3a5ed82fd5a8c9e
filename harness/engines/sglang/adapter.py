"""What the processes of SGLang's engines ask of this room (engines/inside/adapter.py)."""

from typing import Any

from eagletwin.harness.core.records import EngineInfo
from eagletwin.harness.core.trace import Recorder
from eagletwin.harness.engines.inside.adapter import Live, Reached
from eagletwin.harness.engines.protocol import Run

from . import kernels
from .drive import Drive
from .graphs import streams
from .stand_ins import stubs

PACKAGE = "sglang"


start, faults, watch = kernels.start, kernels.faults, streams.watch


def clear() -> None:
    kernels.clear()
    stubs.called.clear()


def drive(worker: Any, run: Run, recorder: Recorder, reached: Reached, live: Live | None, info: EngineInfo) -> Drive:
    driven = Drive(worker, run.case, recorder, reached, run.until, live, jitter=run.jitter, info=info)
    driven.send(run.sends)
    return driven


def swallowed() -> str:
    """SGLang swallowed the exception, and so skipped a kernel."""
    return f"stub {stubs.called[0]} was called and the exception swallowed" if stubs.called else ""
