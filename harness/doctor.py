"""What can run on this machine, and why not. Looks, and boots an engine to be sure; changes nothing."""

import platform
import sys
from dataclasses import dataclass

from .engines.lock import releases
from .engines.source import here
from .errors import EagletwinError
from .models.recipes import RECIPES
from .paths import cache_folder
from .versions import ABSENT, installed

# Measured: an engine process holds some 0.7 GB, most of it shared with its forks.
NEEDED_GIGABYTES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`needed`: without it the CPU engine cannot run; the rest is told for information."""

    what: str
    found: str
    good: bool
    needed: bool
    remedy: str


def examine() -> list[Finding]:
    findings = [
        Finding(
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
    findings.append(_cuda())
    findings.append(_releases())
    return findings


def _memory() -> Finding:
    try:
        with open("/proc/meminfo") as file:
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
        gigabytes = kilobytes / 1e6
    except (OSError, StopIteration):
        return Finding(
            what="memory", found="cannot tell: not Linux?", good=False, needed=True, remedy="the engine forks; use Linux"
        )
    return Finding(
        what="memory",
        found=f"{gigabytes:.1f} GB available",
        good=gigabytes >= NEEDED_GIGABYTES,
        needed=True,
        remedy=f"free {NEEDED_GIGABYTES:g} GB",
    )


def _cache() -> Finding:
    try:
        folder = cache_folder("models")
        probe = folder / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except (OSError, EagletwinError) as error:
        return Finding(
            what="cache",
            found=str(error).partition("\n")[0],
            good=False,
            needed=True,
            remedy="set EAGLETWIN_CACHE to a folder you may write",
        )
    return Finding(what="cache", found=str(folder.parent), good=True, needed=True, remedy="")


def _package(name: str, needed: bool) -> Finding:
    found = installed(name)
    if found != ABSENT:
        return Finding(what=name, found=found, good=True, needed=needed, remedy="")
    remedy = "`make setup`, or install it yourself"
    return Finding(what=name, found="not installed", good=False, needed=needed, remedy=remedy)


def _skipped() -> Finding:
    return Finding(what="CPU engine", found="not tried: see above", good=False, needed=True, remedy="mend what is red above")


def _cpu_engine() -> Finding:
    from .case import Case, Request
    from .engines.process import Host

    case = Case(name="doctor", model=min(RECIPES), num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
    try:
        with Host() as host:
            host.engine(case)
            found = f"SGLang {host.version}: scheduler and EAGLE worker stand"
    except EagletwinError as error:
        return Finding(
            what="CPU engine",
            found=error.cause,
            good=False,
            needed=True,
            remedy="`make setup` installs what it was tested with",
        )
    return Finding(what="CPU engine", found=found, good=True, needed=True, remedy="")


def _cuda() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding(
            what="CUDA engine",
            found=torch.cuda.get_device_name(),
            good=False,
            needed=False,
            remedy="not built yet: this version runs on the CPU",
        )
    why = "this torch is built without CUDA" if torch.version.cuda is None else "no GPU or no driver"
    return Finding(what="CUDA engine", found=why, good=False, needed=False, remedy="only the CPU engine runs here")


def _releases() -> Finding:
    known, there = releases(), here()
    return Finding(
        what="releases",
        found=f"{len(there)} of {len(known)} need no network: {', '.join(there) or 'none'}",
        good=len(there) == len(known),
        needed=False,
        remedy="`--sglang RELEASE` fetches one; `eagletwin releases fetch` all of them",
    )
