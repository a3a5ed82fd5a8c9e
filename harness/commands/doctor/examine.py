"""What can run on this machine, and why not. Looks, and boots an engine to be sure; changes nothing."""

import platform
import sys

from eagletwin.harness.core.environment import ABSENT, installed
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.engines.cuda_here import missing_for_cuda
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.engines.source import here

from ..result import DoctorCheckFacts
from .gpu_tools import gpu_tools

# Measured: an engine process holds some 0.7 GB, most of it shared with its forks.
NEEDED_GIGABYTES = 2.0


def examine() -> list[DoctorCheckFacts]:
    findings = [
        DoctorCheckFacts(
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


def _memory() -> DoctorCheckFacts:
    try:
        with open("/proc/meminfo") as file:
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
        gigabytes = kilobytes / 1e6
    except (OSError, StopIteration):
        return DoctorCheckFacts(
            what="memory", found="cannot tell: not Linux?", good=False, needed=True, remedy="the engine forks; use Linux"
        )
    return DoctorCheckFacts(
        what="memory",
        found=f"{gigabytes:.1f} GB available",
        good=gigabytes >= NEEDED_GIGABYTES,
        needed=True,
        remedy=f"free {NEEDED_GIGABYTES:g} GB",
    )


def _cache() -> DoctorCheckFacts:
    try:
        folder = cache_folder("models")
        probe = folder / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except (OSError, EagletwinError) as error:
        return DoctorCheckFacts(
            what="cache",
            found=str(error).partition("\n")[0],
            good=False,
            needed=True,
            remedy="set EAGLETWIN_CACHE to a folder you may write",
        )
    return DoctorCheckFacts(what="cache", found=str(folder.parent), good=True, needed=True, remedy="")


def _package(name: str, needed: bool) -> DoctorCheckFacts:
    found = installed(name)
    if found != ABSENT:
        return DoctorCheckFacts(what=name, found=found, good=True, needed=needed, remedy="")
    remedy = "`make setup`, or install it yourself"
    return DoctorCheckFacts(what=name, found="not installed", good=False, needed=needed, remedy=remedy)


def _skipped() -> DoctorCheckFacts:
    return DoctorCheckFacts(
        what="CPU engine", found="not tried: see above", good=False, needed=True, remedy="fix what is red above"
    )


def _cpu_engine() -> DoctorCheckFacts:
    from eagletwin.harness.core.case import Case, Request
    from eagletwin.harness.engines.host import Host

    case = Case(name="doctor", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
    try:
        with Host() as host:
            host.engine(case)
            found = f"SGLang {host.version}: scheduler and EAGLE worker stand"
    except EagletwinError as error:
        return DoctorCheckFacts(
            what="CPU engine",
            found=error.cause,
            good=False,
            needed=True,
            remedy="`make setup` installs what it was tested with",
        )
    return DoctorCheckFacts(what="CPU engine", found=found, good=True, needed=True, remedy="")


def _cuda() -> list[DoctorCheckFacts]:
    """The engine, and what it compiles with and imports on a GPU."""
    missing = missing_for_cuda()
    if missing is not None:
        return [DoctorCheckFacts(what="CUDA engine", found=missing[0], good=False, needed=False, remedy=missing[1])]
    import torch

    found = f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} of them; `check 25015 --device cuda` tries it"
    return [
        DoctorCheckFacts(what="CUDA engine", found=found, good=True, needed=False, remedy=""),
        *(
            DoctorCheckFacts(what=what, found=there, good=good, needed=False, remedy="" if good else remedy)
            for what, there, good, remedy in gpu_tools()
        ),
    ]


def _releases() -> DoctorCheckFacts:
    known, there = releases(), here()
    return DoctorCheckFacts(
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
