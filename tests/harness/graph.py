"""The import graph of the source, with installed names resolved: which file imports which, at any depth of nesting."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOPS = ("reference", "cases", "harness")

Graph = dict[str, set[str]]


@cache
def tree(file: Path) -> ast.Module:
    """A file, parsed once: many tests walk it."""
    return ast.parse(file.read_text())


@cache
def modules() -> dict[str, Path]:
    """Dotted names below `eagletwin`, and their files."""
    found = {}
    for file in sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports(file: Path) -> frozenset[str]:
    """Absolute names of the modules that a file imports, inside functions too. Names that are not modules are left out with
    what they are imported from."""
    package = ["eagletwin", *file.relative_to(ROOT).with_suffix("").parts[:-1]]
    found = set[str]()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            inside = module.removeprefix("eagletwin.")
            names = {alias.name for alias in node.names}
            below = {f"{module}.{name}" for name in names if f"{inside}.{name}" in modules()}
            found |= below | ({module} if len(below) < len(names) else set())
    return frozenset(found)


@cache
def file_graph() -> Graph:
    """Which module imports which, of ours."""
    known = modules()
    ours = {name: {one.removeprefix("eagletwin.") for one in imports(file)} for name, file in known.items()}
    return {name: {one for one in used if one in known and one != name} for name, used in ours.items()}


def grouped(graph: Mapping[str, Iterable[str]], rooms: Iterable[str]) -> Graph:
    """The same graph between rooms (dotted prefixes): a module is in the room with the longest name."""
    longest = sorted(rooms, key=len, reverse=True)

    def room(module: str) -> str:
        return next((one for one in longest if module == one or module.startswith(f"{one}.")), module)

    found: Graph = {}
    for module, used in graph.items():
        found.setdefault(room(module), set()).update({room(one) for one in used} - {room(module)})
    return found


def floors(graph: Graph) -> dict[str, int]:
    """How many rooms lie below each, on the longest way down. Raises ValueError if there is a circle."""
    height: dict[str, int] = {}
    while len(height) < len(graph):
        ready = [room for room in graph if room not in height and graph[room] <= height.keys()]
        if not ready:
            raise ValueError(f"a circle: {', '.join(sorted(next(circles(graph))))}")
        height |= {room: max((height[one] + 1 for one in graph[room]), default=0) for room in ready}
    return height


def circles(graph: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """Sets of modules that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, waiting = set[str](), [start]
        while waiting:
            for one in graph.get(waiting.pop(), ()):
                if one not in seen:
                    seen.add(one)
                    waiting.append(one)
        reach[start] = seen
    shown: set[str] = set()
    for start, seen in reach.items():
        if start in seen and start not in shown:
            circle = {one for one in seen if start in reach.get(one, ())}
            shown |= circle
            yield circle
