"""`eagletwin info`: what can run here; the known bugs, rules, releases and models."""

import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from eagletwin.cases.entry import Entry, Known
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN, EagletwinError, InputError
from eagletwin.harness.core.files import ABSENT, cache_folder, installed_version
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE, ENGINES, TITLES, Engine
from eagletwin.harness.core.terminal import count, each, fold, width
from eagletwin.harness.engines.machine import missing_for_cuda
from eagletwin.harness.engines.provision import releases as fetched_releases
from eagletwin.harness.engines.source import here

from .options import flag, option, run_options
from .result import DoctorCheckFacts, DoctorFacts, ReleaseFacts, ReleasesFacts, emit_result, with_json

info = typer.Typer(add_completion=False, help="What can run here; the known bugs, rules, releases and models.")
releases = typer.Typer(add_completion=False, help="The published releases of each engine.")
info.add_typer(releases, name="releases")
AS_JSON = option("", "as_json", bool, False, "", "--json")("As JSON, for programs.")
LEDGER_OPTIONS = (
    flag("", "live")("Only bugs that no release has fixed."),
    option("", "release", str, "", "RELEASE", "--in")("Only bugs of this release."),
    option("", "engine", Engine, DEFAULT_ENGINE, "ENGINE")("Of this engine, where no entry is named."),
    AS_JSON,
)


@info.command()
@run_options(LEDGER_OPTIONS)
def ledger(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]…", help="These entries alone, with all that is known.")
    ] = None,
    *,
    live: bool,
    release: str,
    engine: Engine,
    as_json: bool,
) -> int:
    """List the known bugs: id, releases that have it, what a run needs for it to matter."""
    from eagletwin.cases.ledger import with_probes

    chosen = [entry for entry in with_probes(ids or ["all"], engine) if not (live and entry.fixed)]
    if release:
        [known] = named_releases([release], engine)
        chosen = [entry for entry in chosen if entry.is_in(known)]
    if as_json:
        print(json.dumps([facts(entry) for entry in chosen], indent=1))
        return EXIT_EQUAL
    for entry in chosen:
        print(full_text(entry) if ids else short_text(entry))
    print(f"\n{count(len(chosen), 'bug')}; `eagletwin info ledger ID` says more of one, `eagletwin prove ID` proves it.")
    return EXIT_EQUAL


def facts(entry: Known) -> dict[str, Any]:
    """All that is known of it, for programs."""
    found: dict[str, Any] = {
        "id": entry.id,
        "title": entry.title,
        "rule": entry.rule,
        "buggy": entry.buggy,
        "fixed": entry.fixed,
        "live": not entry.fixed,
        "last_bad": entry.last_bad,
        "hidden": entry.hidden,
        "matters_with": entry.trigger,
    }
    if isinstance(entry, Entry):
        sides = {"revert": entry.revert, "remedy": entry.remedy, "view": entry.view}
        found["told_apart_by"] = next(name for name, part in sides.items() if part is not None)
        found["needs"] = entry.needs.options if entry.needs is not None else ""
    else:
        found["told_apart_by"] = "call"
        found["needs"] = ""  # a call of one function needs no mode
    return found


def short_text(entry: Known) -> str:
    return f"{entry.id:26} {entry.state:24} {entry.rule:20} {entry.title}"


def full_text(entry: Known) -> str:
    """The entry, and what to type."""
    lines = [f"{entry.id}: {entry.title}", f"  releases      {entry.state}", f"  breaks        {entry.rule}"]
    lines.append(f"  matters with  {entry.trigger}")
    if not isinstance(entry, Entry):
        return "\n".join([*lines, f"  try           {entry.command}", ""])
    needs = f" {entry.needs.options}" if entry.needs is not None else ""
    proof = f"eagletwin prove {entry.id} {entry.options}".rstrip()
    lines += [f"  try           {entry.command(entry.red)}{needs}", f"                {proof}", ""]
    return "\n".join(lines)


@info.command()
@run_options((AS_JSON,))
def rules(*, as_json: bool) -> int:
    """List the rules: what must hold, and whether a rule needs the model's weights."""
    from eagletwin.harness.judge.rules import catalogue, rules_json

    if as_json:
        print(rules_json().decode())
        return EXIT_EQUAL
    for name, rule in catalogue().items():
        print(f"{name}  (design {rule.section}; weights: {rule.weights})")
        print("\n".join(fold(rule.sentence, width())))
        for of, says in (("a multi-layer draft", rule.of_layers), ("a plain language model", rule.of_plain)):
            if says is not None:
                print("\n".join(fold(f"Of {of}: {says.sentence}", width())))
    return EXIT_EQUAL


@info.command()
@run_options((AS_JSON,))
def models(*, as_json: bool) -> int:
    """List the model recipes: tiny, synthetic target / draft pairs, one family a block."""
    from eagletwin.harness.families import FAMILIES

    facts = [
        {
            "family": family.name,
            "stores": family.stored,
            "limits": list(family.limits),
            "recipes": [
                {
                    "name": recipe.name,
                    "algorithm": recipe.algorithm,
                    "target_layers": recipe.target.num_layers,
                    "vocabulary": recipe.target.vocab_size,
                    "draft_vocabulary": recipe.draft_vocab_size or recipe.target.vocab_size,
                    "draft_layers": recipe.mtp_layers or 1,
                    "chained": recipe.chained,
                    "target_hidden": recipe.target_hidden,
                    "max_position": recipe.max_position,
                    "window": recipe.window,
                }
                for recipe in family.recipes
            ],
        }
        for family in FAMILIES.values()
    ]
    if as_json:
        print(json.dumps(facts, indent=1))
        return EXIT_EQUAL
    for family in FAMILIES.values():
        print(f"{family.name}{': ' if family.limits else ''}{', '.join(family.limits)}")
        for recipe in family.recipes:
            layers = f", {recipe.mtp_layers} draft layers{', chained' if recipe.chained else ''}" if recipe.mtp_layers else ""
            reduced = f", draft vocabulary {recipe.draft_vocab_size}" if recipe.draft_vocab_size else ""
            target = f"target of {count(recipe.target.num_layers, 'layer')}, vocabulary {recipe.target.vocab_size}"
            print(f"  {recipe.name:18} {recipe.algorithm:7} {target}{reduced}{layers}")
    print(
        "\nThe weights are made from a seed. A case names a recipe as its `model`, and no other checkpoint."
        "\nOf your own checkpoint `eagletwin acceptance` says what it deserves, `eagletwin record` what a server does with it."
    )
    return EXIT_EQUAL


OF_ENGINE = option("", "engine", Engine, DEFAULT_ENGINE, "ENGINE")("Of this engine.")


@releases.command("list")
@with_json
@run_options((OF_ENGINE,))
def releases_list(*, engine: Engine) -> int:
    """List the releases of an engine that a run can name, and which of them are in the cache. Fetches nothing."""
    known, there = fetched_releases(engine), here(engine)
    for name in known:
        print(f"{name:14} {'here' if name in there else 'to be fetched'}")
    emit_result(ReleasesFacts(releases=[ReleaseFacts(name=name, here=name in there) for name in known]))
    return EXIT_EQUAL


@releases.command("fetch")
@with_json
@run_options((OF_ENGINE,))
def releases_fetch(
    names: Annotated[list[str] | None, typer.Argument(metavar="RELEASE…", help="Releases; without any, all of them.")] = None,
    *,
    engine: Engine,
) -> int:
    """Fetch releases, and the packages that they pin, into the cache: for work without a network."""
    from eagletwin.harness.engines.source import resolve

    fetched = []
    for name in each(named_releases(names, engine), "releases", str):
        paths = [str(path) for path in resolve(name, engine).paths]
        fetched.append(ReleaseFacts(name=name, here=True, paths=paths))
        print(f"{name:14} {', '.join(paths) or 'installed'}", flush=True)
    emit_result(ReleasesFacts(releases=fetched))
    return EXIT_EQUAL


def named_releases(names: list[str] | None, engine: Engine = DEFAULT_ENGINE) -> list[str]:
    """The releases of these names; all of them if no name is given. Raises InputError for an unknown release."""
    known = fetched_releases(engine)
    for name in names or ():
        if name not in known:
            raise InputError(
                f"{name!r} is not a known release of {TITLES[engine]}",
                consequence="nothing was done",
                remedy=f"use some of {', '.join(known)}",
            )
    return [name for name in known if name in names] if names else list(known)


# `eagletwin info doctor`: what can run on this machine, and what is missing. Boots an engine to be sure; changes nothing.


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
    for name in ("torch", "triton", "transformers", *(engine for engine, facts in ENGINES.items() if facts.installed)):
        found = installed_version(name)
        absent = found == ABSENT
        findings.append(_fact(name, "not installed" if absent else found, "`make setup`, or install it yourself" * absent))
    able = all(finding.good or not finding.needed for finding in findings)
    findings.append(_cpu_engine() if able else _fact("CPU engine", "not tried: see above", "fix what is red above"))
    return [*findings, *_cuda(), *map(_releases, ENGINES)]


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
            return _fact("CPU engine", f"{host.mode.title} {host.version}: scheduler and EAGLE worker stand")
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


def _releases(engine: Engine) -> DoctorCheckFacts:
    known, there = fetched_releases(engine), here(engine)
    of = "" if engine == DEFAULT_ENGINE else f" --engine {engine}"
    rest = f"; `--{engine}` fetches the one that it names, `eagletwin info releases fetch{of}` all" * (len(there) < len(known))
    found = f"{len(there)} of {len(known)} are here: {', '.join(there) or 'none'}{rest}"
    return _fact(f"{TITLES[engine]} releases", found, needed=False)


@info.command()
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
