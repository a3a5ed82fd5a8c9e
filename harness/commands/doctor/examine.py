"""What can run on this machine, and why not. Looks, and boots an engine to be sure; changes nothing."""

import platform
import sys
from dataclasses import dataclass

from eagletwin.harness.core.environment import ABSENT, installed
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.engines.cuda_here import missing_for_cuda
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.engines.source import here

from .gpu_tools import gpu_tools

# Measured: an engine process holds some 0.7 GB, most of it shared with its forks.
NEEDED_GIGABYTES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`needed`: without it the CPU engine cannot run; the other checks are for information."""

    what: str
    found: str
    good: bool
    needed: bool
    remedy: str


def examine() -> list[Check]:
    findings = [
        Check(
            what="Python",
            found=platform.python_version(),
            good=sys.version_info >= (3, 11),
            needed=True,
            remedy="use Python 3.11 or newer",
        ),
        _memory(),
        _cache(),
        *(
            _package(name, needed)
            for name, needed in (("torch", True), ("triton", True), ("transformers", True), ("sglang", True))
        ),
    ]
    findings.append(_cpu_engine() if all(finding.good or not finding.needed for finding in findings) else _skipped())
    findings += _cuda()
    findings.append(_releases())
    return findings


def _memory() -> Check:
    try:
        with open("/proc/meminfo") as file:
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
        gigabytes = kilobytes / 1e6
    except (OSError, StopIteration):
        return Check(
            what="memory", found="cannot tell: not Linux?", good=False, needed=True, remedy="the engine forks; use Linux"
        )
    return Check(
        what="memory",
        found=f"{gigabytes:.1f} GB available",
        good=gigabytes >= NEEDED_GIGABYTES,
        needed=True,
        remedy=f"free {NEEDED_GIGABYTES:g} GB",
    )


def _cache() -> Check:
    try:
        folder = cache_folder("models")
        probe = folder / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except (OSError, EagletwinError) as error:
        return Check(
            what="cache",
            found=str(error).partition("\n")[0],
            good=False,
            needed=True,
            remedy="set EAGLETWIN_CACHE to a folder you may write",
        )
    return Check(what="cache", found=str(folder.parent), good=True, needed=True, remedy="")


def _package(name: str, needed: bool) -> Check:
    found = installed(name)
    if found != ABSENT:
        return Check(what=name, found=found, good=True, needed=needed, remedy="")
    remedy = "`make setup`, or install it yourself"
    return Check(what=name, found="not installed", good=False, needed=needed, remedy=remedy)


def _skipped() -> Check:
    return Check(what="CPU engine", found="not tried: see above", good=False, needed=True, remedy="fix what is red above")


def _cpu_engine() -> Check:
    from eagletwin.harness.core.case import Case, Request
    from eagletwin.harness.engines.host import Host

    case = Case(name="doctor", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
    try:
        with Host() as host:
            host.engine(case)
            found = f"SGLang {host.version}: scheduler and EAGLE worker stand"
    except EagletwinError as error:
        return Check(
            what="CPU engine",
            found=error.cause,
            good=False,
            needed=True,
            remedy="`make setup` installs what it was tested with",
        )
    return Check(what="CPU engine", found=found, good=True, needed=True, remedy="")


def _cuda() -> list[Check]:
    """The engine, and what it compiles with and imports on a GPU."""
    missing = missing_for_cuda()
    if missing is not None:
        return [Check(what="CUDA engine", found=missing[0], good=False, needed=False, remedy=missing[1])]
    import torch

    found = f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} of them; `check 25015 --device cuda` tries it"
    return [
        Check(what="CUDA engine", found=found, good=True, needed=False, remedy=""),
        *(
            Check(what=what, found=there, good=good, needed=False, remedy="" if good else remedy)
            for what, there, good, remedy in gpu_tools()
        ),
    ]


def _releases() -> Check:
    known, there = releases(), here()
    return Check(
        what="releases",
        found=f"{len(there)} of {len(known)} are here: {', '.join(there) or 'none'}"
        + (
            ""
            if len(there) == len(known)
            else "; `--sglang` fetches the one that it names, `eagletwin info releases fetch` all"
        ),
        good=True,
        needed=False,
        remedy="",
    )
