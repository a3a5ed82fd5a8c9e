"""The properties of the kernel tier, a file a subject, and the names that `eagletwin kernels` takes. Imports no SGLang.
docs/explanation/kernels.md has a row for each function."""

import json
from types import ModuleType

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.terminal import count, nearest

from ...options import nothing_run
from ..tier import Property
from . import cache_locs, commit, draft_plans, kv_indices, kv_move, rotate, sampling, select, tree, two_ways

FILES = (tree, sampling, select, cache_locs, kv_indices, commit, kv_move, rotate, two_ways, draft_plans)


def properties_of(file: ModuleType) -> tuple[Property, ...]:
    """Those of one file, in its order."""
    return tuple(of for of in vars(file).values() if isinstance(of, Property))


ALL: tuple[Property, ...] = tuple(of for file in FILES for of in properties_of(file))
FUNCTIONS: dict[str, list[Property]] = {
    target: [of for of in ALL if target in of.functions] for target in dict.fromkeys(t for of in ALL for t in of.functions)
}
"""Dotted name of each function of SGLang, as 0.5.23 calls it -> the properties about it."""


def chosen(names: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(functions, properties) of these names; all of them if no name is given. Raises InputError for an unknown name.

    A function is named by its dotted name, or by the end of it; the properties about it run. A property is named as it is
    printed, with spaces, - or _.
    """
    if not names:
        return tuple(FUNCTIONS), tuple(of.name for of in ALL)
    functions: set[str] = set()
    properties: set[str] = set()
    for name in names:
        of = next((of for of in ALL if of.name == name.replace("_", " ").replace("-", " ")), None)
        if of is not None:
            functions |= {*of.functions}
            properties.add(of.name)
            continue
        found = [function for function in FUNCTIONS if f".{function}".endswith(f".{name}")]
        if not found:
            raise _unknown(name)
        functions |= {*found}
        properties |= {of.name for function in found for of in FUNCTIONS[function]}
    return tuple(name for name in FUNCTIONS if name in functions), tuple(of.name for of in ALL if of.name in properties)


def _unknown(name: str) -> InputError:
    known = [*(function.rpartition(".")[2] for function in FUNCTIONS), *(of.name for of in ALL)]
    return nothing_run(
        f"{name!r} is neither a function of the kernel tier nor a property",
        nearest(name.rpartition(".")[2], known, "`eagletwin kernels --list`"),
    )


def listing(functions: tuple[str, ...], as_json: bool) -> str:
    """Each function with its properties, what the reference of them is, and how many faults are planted in it."""
    rows = {name: [of.name for of in FUNCTIONS[name]] for name in functions}
    faults = {name: sum(fault.target == name for of in FUNCTIONS[name] for fault in of.faults) for name in functions}
    if as_json:
        return json.dumps(
            [{"function": name, "properties": of, "planted_faults": faults[name]} for name, of in rows.items()], indent=1
        )
    return "\n".join(f"{name}\n    {', '.join(of)}; {count(faults[name], 'planted fault')}" for name, of in rows.items())
