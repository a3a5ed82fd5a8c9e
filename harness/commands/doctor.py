"""`eagletwin info doctor`: what can run on this machine, and what is missing. Boots an engine to be sure; changes nothing."""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
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


_NVCC = "0.5.23 compiles kernels when they are first used; install CUDA's toolkit, or set CUDA_HOME"


def _gpu_tools() -> Iterator[DoctorCheckFacts]:
    """What the CUDA engine compiles with and imports."""
    home = cuda_home()
    files = (
        ("nvcc", home and home / "bin" / "nvcc", _NVCC),
        ("libcudart.so", home and home / "lib64" / "libcudart.so", "kernels are linked with it; set CUDA_HOME"),
        ("curand.h", _curand(home), "FlashInfer's sampling includes it; name its folder in CPATH"),
        ("ninja", shutil.which("ninja"), "install ninja: it starts the compilers"),
    )
    for what, file, remedy in files:
        there = file is not None and Path(file).exists()
        yield _fact(what, str(file) if there else "not found", remedy * (not there), needed=False)
    for module, package, remedy in _PACKAGES:
        there, version = importlib.util.find_spec(module) is not None, installed_version(package)
        found = "not installed" if not there else "there" if version == ABSENT else version
        yield _fact(module, found, remedy * (not there), needed=False)


def cuda_home() -> Path | None:
    """The CUDA toolkit: $CUDA_HOME, where the nvcc of the path lies, or the usual place, as that nvcc may be a script."""
    named, nvcc = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    if named:
        return Path(named)
    places = [Path(nvcc).resolve().parents[1]] if nvcc else []
    return next(
        (place for place in (*places, Path("/usr/local/cuda")) if (place / "include" / "cuda_runtime.h").exists()), None
    )


def _curand(home: Path | None) -> Path | None:
    """The header in the toolkit, or among the packages of NVIDIA's that pip installs."""
    found = importlib.util.find_spec("nvidia")
    packages = [Path(place) / "cu13" for place in (found.submodule_search_locations or ())] if found is not None else []
    places = [place / "include" / "curand.h" for place in (*([home] if home is not None else []), *packages)]
    return next((place for place in places if place.is_file()), None)


# Measured: an engine process holds some 0.7 GB, most of it shared with its forks.
NEEDED_GIGABYTES = 2.0


def examine() -> list[DoctorCheckFacts]:
    python, supported = platform.python_version(), sys.version_info >= (3, 11)
    findings = [_fact("Python", python, "use Python 3.11 or newer", good=supported), _memory(), _cache()]
    for name in ("torch", "triton", "transformers", "sglang"):
        found = installed_version(name)
        absent = found == ABSENT
        findings.append(_fact(name, "not installed" if absent else found, "`make setup`, or install it yourself" * absent))
    able = all(finding.good or not finding.needed for finding in findings)
    findings.append(_cpu_engine() if able else _fact("CPU engine", "not tried: see above", "fix what is red above"))
    return [*findings, *_cuda(), _releases()]


def _fact(what: str, found: str, remedy: str = "", *, good: bool | None = None, needed: bool = True) -> DoctorCheckFacts:
    """good: by default, whether there is no remedy."""
    return DoctorCheckFacts(what=what, found=found, good=not remedy if good is None else good, needed=needed, remedy=remedy)


def _memory() -> DoctorCheckFacts:
    try:
        with open("/proc/meminfo") as file:
            gigabytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) / 1e6
    except (OSError, StopIteration):
        return _fact("memory", "cannot tell: not Linux?", "the engine forks; use Linux")
    enough = gigabytes >= NEEDED_GIGABYTES
    return _fact("memory", f"{gigabytes:.1f} GB available", f"free {NEEDED_GIGABYTES:g} GB", good=enough)


def _cache() -> DoctorCheckFacts:
    try:
        folder = cache_folder("models")
        probe = folder / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except (OSError, EagletwinError) as error:
        return _fact("cache", str(error).partition("\n")[0], "set EAGLETWIN_CACHE to a folder you may write")
    return _fact("cache", str(folder.parent))


def _cpu_engine() -> DoctorCheckFacts:
    from eagletwin.harness.core.case import Case, Request
    from eagletwin.harness.engines.host import Host

    case = Case(name="doctor", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
    try:
        with Host() as host:
            host.engine(case)
            return _fact("CPU engine", f"SGLang {host.version}: scheduler and EAGLE worker stand")
    except EagletwinError as error:
        return _fact("CPU engine", error.cause, "`make setup` installs what it was tested with")


def _cuda() -> list[DoctorCheckFacts]:
    """The engine, and what it compiles with and imports on a GPU."""
    missing = missing_for_cuda()
    if missing is not None:
        return [_fact("CUDA engine", *missing, needed=False)]
    import torch

    found = f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} of them; `check 25015 --device cuda` tries it"
    return [_fact("CUDA engine", found, needed=False), *_gpu_tools()]


def _releases() -> DoctorCheckFacts:
    known, there = releases(), here()
    rest = "; `--sglang` fetches the one that it names, `eagletwin info releases fetch` all" * (len(there) < len(known))
    found = f"{len(there)} of {len(known)} are here: {', '.join(there) or 'none'}{rest}"
    return _fact("releases", found, needed=False)


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
