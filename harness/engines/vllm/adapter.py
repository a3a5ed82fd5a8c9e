"""What the processes of vLLM's engines ask of this room (engines/inside/adapter.py)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from eagletwin.harness.core.records import EngineInfo
from eagletwin.harness.core.trace import Recorder
from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.inside import changes, violations
from eagletwin.harness.engines.inside.adapter import Live, Reached
from eagletwin.harness.engines.protocol import Build, Run

from .drive import CoreDrive

PACKAGE = "vllm"


def start(build: Build, worker: Any) -> None:  # noqa: ARG001
    changes.watch_kernels()
    changes.watch_launches(fast=build.kernels != "interpreter")
    if build.kernels != "interpreter":
        triton_cpu.install(violations.CHECKS[build.kernels])


def clear() -> None:
    triton_cpu.clear()


def drive(worker: Any, run: Run, recorder: Recorder, reached: Reached, live: Live | None, info: EngineInfo) -> CoreDrive:  # noqa: ARG001
    return CoreDrive(worker, run.case, recorder, reached, run.until, live)


def watch(worker: Any) -> AbstractContextManager[None]:  # noqa: ARG001
    return nullcontext()


def swallowed() -> str:
    """Nothing of the adapter's can be called in the place of what vLLM lacks."""
    return ""


faults = triton_cpu.faults
