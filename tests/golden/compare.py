"""What differs between two files of golden verdicts, or of commands: a verdict that is another, and numbers beside it."""

from collections.abc import Iterator
from typing import Any

# What makes a verdict another one. The rest is listed, and fails nothing.
DECISIVE = ("clean", "exit", "finding", "rule", "status", "undecided", "vacuous")
PLACE = ("rule", "request", "round", "stage", "step", "layer", "rank", "index")
Line = dict[str, Any]


def differences(old: list[Line], new: list[Line]) -> dict[bool, dict[str, list[str]]]:
    """What changed -> the ids of the lines in which it did; decisive changes under True."""
    found: dict[bool, dict[str, list[str]]] = {True: {}, False: {}}
    befores, afters = ({line["id"]: line for line in lines if "patch" not in line} for lines in (old, new))
    for name in sorted(befores | afters):
        before, after = befores.get(name), afters.get(name)
        if before is None or after is None:
            found[before is not None].setdefault("only in NEW" if before is None else "missing in NEW", []).append(name)
            continue
        for decisive, what in _changes(before, after):
            found[decisive].setdefault(what, []).append(name)
    return found


def text(found: dict[bool, dict[str, list[str]]], compared: int) -> Iterator[str]:
    """Lines for people: the most frequent change first."""
    for decisive, title in ((True, "verdicts that changed"), (False, "verdicts that stand, with other numbers or words")):
        groups = sorted(found[decisive].items(), key=lambda group: (-len(group[1]), group[0]))
        lines = {name for names in found[decisive].values() for name in names}
        yield f"{title}: {len(lines)} of {compared}"
        for what, names in groups:
            some = names if decisive else names[:3]
            yield f"  {len(names)} x {what}: {', '.join(some)}{', …' * (len(some) < len(names))}"


def _changes(before: Line, after: Line) -> Iterator[tuple[bool, str]]:
    if before.get("digest") != after.get("digest"):
        yield True, "digest: another case"
        return
    old, new = flat(before["verdict"]), flat(after["verdict"])
    places = [[said.get(f"first.{name}") for name in PLACE] for said in (old, new)]
    if places[0] != places[1]:
        yield True, f"place: {places[0]} -> {places[1]}"
    for name in sorted(old | new):
        if old.get(name) == new.get(name) or (name.removeprefix("first.") in PLACE and name != "rule"):
            continue
        number = isinstance(old.get(name, 0), int) and isinstance(new.get(name, 0), int) and name not in DECISIVE
        yield name in DECISIVE, name if number else f"{name}: {' -> '.join(_apart(repr(old.get(name)), repr(new.get(name))))}"


def _apart(old: str, new: str, width: int = 150) -> tuple[str, str]:
    """Two long texts from a little before the place where they differ."""
    if max(len(old), len(new)) <= width:
        return old, new
    same = next((place for place, both in enumerate(zip(old, new, strict=False)) if both[0] != both[1]), width)
    start = max(0, same - 40)
    return old[start : start + width], new[start : start + width]


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested objects by their dotted names; a list is a leaf."""
    if not isinstance(value, dict):
        return {name: value}
    return {key: leaf for one, inner in value.items() for key, leaf in flat(inner, f"{name}.{one}".lstrip(".")).items()}
