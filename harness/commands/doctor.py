"""`eagletwin info doctor`: what can run on this machine, and what is missing. Boots an engine to be sure; changes nothing."""

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN, EagletwinError
from eagletwin.harness.core.files import ABSENT, cache_folder, installed_version
from eagletwin.harness.engines.machine import missing_for_cuda
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.engines.source import here

from .result import DoctorCheckFacts, DoctorFacts, emit_result, with_json

# Module, package, and what lacks without it. Where a release has no need of one, its absence is no fault.
_PACKAGES = (
    ("cutlass", "nvidia-cutlass-dsl", "0.5.23 imports it with every Llama; install nvidia-cutlass-dsl"),
    ("flashinfer", "flashinfer-python", "0.5.23 compiles tree sampling with its headers; install flashinfer-python"),
    ("flash_mla", "sgl-flash-mla", "`--attention flashmla` alone; install sgl-flash-mla"),
)


def gpu_tools() -> list[tuple[str, str, bool, str]]:
    """What, what was found, whether it is there, and what to do."""
    home = cuda_home()
    nvcc = home / "bin" / "nvcc" if home is not None else None
    found = [
        _file("nvcc", nvcc, "0.5.23 compiles kernels when they are first used; install CUDA's toolkit, or set CUDA_HOME"),
        _file("libcudart.so", home and home / "lib64" / "libcudart.so", "kernels are linked with it; set CUDA_HOME"),
        _file("curand.h", _curand(home), "FlashInfer's sampling includes it; name its folder in CPATH"),
        _file("ninja", shutil.which("ninja"), "install ninja: it starts the compilers"),
    ]
    for module, package, remedy in _PACKAGES:
        there = importlib.util.find_spec(module) is not None
        version = installed_version(package)
        found.append((module, "not installed" if not there else "there" if version == ABSENT else version, there, remedy))
    return found


def cuda_home() -> Path | None:
    """The CUDA toolkit: $CUDA_HOME, where the nvcc of the path lies, or the usual place, as that nvcc may be a script."""
    named, nvcc = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    if named:
        return Path(named)
    places = [Path(nvcc).resolve().parents[1]] if nvcc else []
    return next(
        (place for place in (*places, Path("/usr/local/cuda")) if (place / "include" / "cuda_runtime.h").exists()), None
    )


def _file(what: str, file: Path | str | None, remedy: str) -> tuple[str, str, bool, str]:
    there = file is not None and Path(file).exists()
    return what, str(file) if there else "not found", there, remedy


def _curand(home: Path | None) -> Path | None:
    """The header in the toolkit, or among the packages of NVIDIA's that pip installs."""
    found = importlib.util.find_spec("nvidia")
    packages = [Path(place) / "cu13" for place in (found.submodule_search_locations or ())] if found is not None else []
    places = [place / "include" / "curand.h" for place in (*([home] if home is not None else []), *packages)]
    return next((place for place in places if place.is_file()), None)


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
    findings.append(_cpu_engine() if all(finding.good or not finding.needed for finding in findings) else _skipped_check())
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
    found = installed_version(name)
    if found != ABSENT:
        return DoctorCheckFacts(what=name, found=found, good=True, needed=needed, remedy="")
    remedy = "`make setup`, or install it yourself"
    return DoctorCheckFacts(what=name, found="not installed", good=False, needed=needed, remedy=remedy)


def _skipped_check() -> DoctorCheckFacts:
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


@with_json
def doctor() -> int:
    """Report what can run on this machine, and what is missing."""
    from eagletwin.harness.page.render import print_table

    checks, rows = examine(), []
    for check in checks:
        mark = "[green]ok[/]" if check.good else "[red]no[/]" if check.needed else "[yellow]no[/]"
        rows.append((mark, check.what, check.found, "" if check.good else check.remedy))
    print_table(("", "what", "found", "remedy"), rows)
    emit_result(DoctorFacts(checks=checks))
    return EXIT_EQUAL if all(check.good or not check.needed for check in checks) else EXIT_UNKNOWN
