"""What can run on this machine, and why not. Looks, and boots an engine to be sure; changes nothing."""

import importlib.util
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from .engines.lock import releases
from .engines.mode import Attention
from .engines.source import here
from .errors import EagletwinError
from .models.recipes import RECIPES
from .paths import cache_folder
from .versions import ABSENT, installed
from .words import count

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


def missing_for_cuda(gpus: int = 1, attention: Attention = "triton") -> tuple[str, str] | None:
    """What the CUDA engine lacks here for a worker on this many GPUs, and what to do about it; None if nothing."""
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA", "install a build of torch with CUDA on a machine with an NVIDIA GPU"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU", "run it where `nvidia-smi` shows one; `eagletwin gpu bundle` packs what it needs"
    if torch.cuda.device_count() < gpus:
        return (
            f"torch sees {count(torch.cuda.device_count(), 'GPU')}, and {gpus} ranks need one each",
            "run it where there are more",
        )
    for package, name in (("sgl_kernel", "SGLang's CUDA kernels (sgl_kernel)"), ("sglang", "sglang")):
        if importlib.util.find_spec(package) is None:
            return f"{name} cannot be found", "install SGLang with its dependencies, or source the setup.sh of a bundle"
    return _missing_for_fa3() if attention == "fa3" else None


def _missing_for_fa3() -> tuple[str, str] | None:
    """The same, of FlashAttention 3: a Hopper GPU, and the library of its kernels, which no bundle holds."""
    import torch

    if torch.cuda.get_device_capability()[0] != 9:
        return f"FlashAttention 3 is run on Hopper, and this is {torch.cuda.get_device_name()}", "leave --attention fa3 out"
    found = importlib.util.find_spec("sgl_kernel")
    folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found is not None else []
    if not any(file for folder in folders for file in folder.glob("flash_ops*.so")):
        return (
            "sgl_kernel has no flash_ops, FlashAttention's kernels",
            "install sglang-kernel whole; `eagletwin gpu bundle DIR --flash-attention` packs them",
        )
    return None


def _cuda() -> Finding:
    missing = missing_for_cuda()
    if missing is not None:
        return Finding(what="CUDA engine", found=missing[0], good=False, needed=False, remedy=missing[1])
    import torch

    found = f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} of them; `check 25015 --device cuda` tries it"
    return Finding(what="CUDA engine", found=found, good=True, needed=False, remedy="")


def _releases() -> Finding:
    known, there = releases(), here()
    return Finding(
        what="releases",
        found=f"{len(there)} of {len(known)} are here: {', '.join(there) or 'none'}"
        + ("" if len(there) == len(known) else "; `--sglang` fetches another when it is named, `eagletwin releases fetch` all"),
        good=True,
        needed=False,
        remedy="",
    )
