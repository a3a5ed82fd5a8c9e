"""The ledger: a file for each known bug, with its ENTRY, or ENTRIES where several share code or a subject.

ENTRIES maps ids to entries, LEDGER to those of SGLang, PROBES to bugs that one call shows. The functions find entries, cases
and patches by name.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Patch, read_patch
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE, TITLES, Engine
from eagletwin.harness.core.terminal import nearest
from eagletwin.harness.families.valid import read_case

from ..entry import Entry, Known, Probe

# The first of the candidate fixes that explain a divergence equally well is named. A name is that of a bug or of a file, or one
# that names of bugs begin with. A file that is not in this list comes after those that are, in the order of names.
_ORDER = """
pr_10846 pr_22088 pr_25015 pr_26329 pr_26972 pr_26997 pr_33758 pr_8409 pr_22954 row_overflow indices_overflow
overlap_context_end small_tree chain_hidden multi_layer multi_layer_chunk_tail multi_layer_topk
host session tree_window certain_node logit_processor min_p penalties input_logprob_id hidden grammar
guidance impossible_sampler mixed retracted boundary_kv greedy_drafts
retracted_chunk_tail two_chunked context_end standalone draft_window decode_window
hybrid_keys prefill_graph draft_plan pipeline tree_slots deterministic_window adaptive
vllm
pr_22958 pr_23331 pr_27095 pr_29354 pr_37836 pr_26239 pr_22832 dsv4_draft_reads dsa_draft_reads
""".split()  # noqa: SIM905


def _load_entries(names: Iterable[str]) -> Iterator[Known]:
    """The bugs of these modules, in the order of the ledger."""
    found = []
    for name in sorted(names):
        module = import_module(f"{__name__}.{name}")
        found += [(_place(name, bug.id.replace("-", "_")), bug) for bug in getattr(module, "ENTRIES", None) or (module.ENTRY,)]
    yield from (bug for _, bug in sorted(found, key=lambda pair: pair[0]))


def _place(file: str, bug: str) -> int:
    begins = next((name for name in _ORDER if bug.startswith(f"{name}_")), "")
    return next((_ORDER.index(name) for name in (bug, file, begins) if name in _ORDER), len(_ORDER))


def by_id(bugs: Iterable[Known]) -> dict[str, Known]:
    """Bugs by their ids. Raises ValueError if two have the same."""
    found: dict[str, Known] = {}
    for bug in bugs:
        if found.setdefault(bug.id, bug) is not bug:
            raise ValueError(f"two entries of the ledger have the id {bug.id}")
    return found


_KNOWN = by_id(_load_entries(module.name for module in iter_modules(__path__)))
ENTRIES = {name: bug for name, bug in _KNOWN.items() if isinstance(bug, Entry)}
PROBES = {name: bug for name, bug in _KNOWN.items() if isinstance(bug, Probe)}


def entries_in(engine: Engine) -> dict[str, Entry]:
    return {name: entry for name, entry in ENTRIES.items() if entry.engine == engine}


LEDGER = entries_in(DEFAULT_ENGINE)


def patches_of(
    revert: list[str] | None, remedy: list[str] | None, patch: list[Path] | None, engine: Engine = DEFAULT_ENGINE
) -> tuple[Patch, ...]:
    """The patches that undo these fixes, apply these candidate fixes, and lie in these files. Raises InputError, also for those
    of another engine."""

    def refusal(name: str, what: str, remedy: str) -> InputError:
        return InputError(f"entry {name} has no {what}", consequence="nothing was run", remedy=remedy)

    for entry in (entry for name in (*(revert or ()), *(remedy or ())) for entry in entries_of(name)):
        if entry.engine != engine:
            raise InputError(
                f"entry {entry.id} is a bug of {TITLES[entry.engine]}, and {TITLES[engine]} runs",
                consequence="nothing was run",
                remedy=f"leave it out, or give --engine {entry.engine}",
            )
    patches: list[Patch] = []
    for entry in (entry for name in revert or () for entry in entries_of(name)):
        if entry.revert is None:
            live = f"it is live: `eagletwin check {entry.id}` shows it as the release is, `prove {entry.id}` both sides"
            raise refusal(entry.id, "fix that could be undone", live)
        patches.append(entry.revert)
    for entry in (entry for name in remedy or () for entry in entries_of(name)):
        if entry.remedy is None:
            raise refusal(entry.id, "candidate fix", f"`eagletwin prove {entry.id}` shows both sides of it")
        patches.append(entry.remedy)
    # entries that share a fix, or the same one twice: an edit is made once
    return tuple(dict.fromkeys([*patches, *(read_patch(file) for file in patch or ())]))


def entry_of(name: str) -> Entry:
    """The entry of this id. Raises InputError if no id, or more than one, begins so."""
    found = entries_of(name)
    if len(found) > 1:
        raise InputError(
            f"{name} has several entries",
            consequence="nothing was run",
            remedy=f"use one of {', '.join(entry.id for entry in found)}",
        )
    return found[0]


def entries_of(name: str) -> list[Entry]:
    """The entry of this id, or all whose id begins with these words. Raises InputError if no id does."""
    found = _matching(name)
    if not found and name.removeprefix("#") in PROBES:
        raise InputError(
            f"entry {name} is a call of one function of SGLang, and has no case",
            consequence="nothing was run",
            remedy=PROBES[name.removeprefix("#")].command,
        )
    if not found:
        raise InputError(
            f"the ledger has no entry {name!r}",
            consequence="nothing was run",
            remedy=nearest(name, ENTRIES, "`eagletwin info ledger`"),
        )
    return found


def _matching(name: str) -> list[Entry]:
    """The entry of this id, or all whose id begins with these words; an empty list if no id does."""
    name = name.removeprefix("#")
    if name in ENTRIES:  # and not also those that are named after it, such as draft-plan-flashmla after draft-plan
        return [ENTRIES[name]]
    return [entry for entry in ENTRIES.values() if entry.id.startswith(f"{name}-")]


def ledger_of(names: list[str], engine: Engine = DEFAULT_ENGINE) -> list[Entry]:
    """The entries of these names; of `all`, the whole ledger of this engine. Raises InputError."""
    return [*entries_in(engine).values()] if "all" in names else [entry for name in names for entry in entries_of(name)]


def remedies_of(names: Iterable[str]) -> tuple[Patch, ...]:
    """The remedies of the entries with these ids, but for those that have none."""
    return tuple(remedy for name in names if (remedy := ENTRIES[name].remedy) is not None)


def with_probes(names: list[str], engine: Engine = DEFAULT_ENGINE) -> list[Known]:
    """The same, and the probes: calls of a single function instead of a case, which run on whole releases only."""
    everything = [one for one in PROBES.values() if one.engine == engine]
    probes = everything if "all" in names else [PROBES[name] for name in names if name in PROBES]
    return [*ledger_of([name for name in names if name not in PROBES], engine), *probes]


def case_of(name: str) -> Case:
    """The case in this file, or of this entry. Raises InputError."""
    entry = find_entry(name)
    return entry.case if entry is not None else read_case(Path(name))


def find_entry(name: str) -> Entry | None:
    """The entry that is meant by the name of a case; None: it is a file. Raises InputError."""
    if Path(name).exists() or not (name.removeprefix("#").isdigit() or _matching(name)):
        return None
    return entry_of(name)  # says which entries there are
