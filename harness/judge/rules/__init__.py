"""The registry of rules: one decorated function each, in the files of this folder.

`stages` names the records that a method of a `Rules` is called with, and `rule` declares a rule beside the function that checks
it. A new rule is one such function, in any file here. What names rules (`--without`, the tables of
docs/reference/rules.md, `info rules`) is derived from these declarations. Those of a file that is not imported are read from
its source: the names must be known before torch is imported, as all rules do.
"""

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.terminal import nearest

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Sentence(NamedTuple):
    """What must hold; section: of docs/explanation/design.md."""

    section: str
    sentence: str


class Rule(NamedTuple):
    """What must hold, and what it takes to check it. The rule's name is stable: the kind of a divergence.

    weights    whether the reference must compute with the model's weights: `no`, what is compared follows from the tokens and
               from other integers of the trace (or the engine checks it as it runs); `in part`, some of it does; `yes`, nothing
    stages     of the records that it looks at; none of a rule on whole traces, or on what ended a run
    of_layers, of_plain  what holds instead of a multi-layer draft, and of a draft that is a plain language model; in the view
               `shifted` the latter is held to what holds of an EAGLE head
    """

    section: str
    sentence: str
    weights: Literal["no", "in part", "yes"]
    stages: tuple[str, ...] = ()
    of_layers: Sentence | None = None
    of_plain: Sentence | None = None


_DECLARED: dict[str, Rule] = {}


def rule(
    name: str,
    section: str,
    *,
    weights: Literal["no", "in part", "yes"],
    sentence: str = "",
    also: tuple[str, ...] = (),
    of_layers: tuple[str, str] | None = None,
    of_plain: tuple[str, str] | None = None,
) -> Callable[[_Function], _Function]:
    """Declare a rule, by literals.

    sentence  that must hold: the function's docstring, where it has no other
    also      stages beside those of the function at which another function compares for the rule
    """

    def declare(function: _Function) -> _Function:
        seen, says = (*getattr(function, "stages", ()), *also), sentence or " ".join((function.__doc__ or "").split())
        others = (Sentence(*one) if one is not None else None for one in (of_layers, of_plain))
        _DECLARED[name] = Rule(section, says, weights, seen, *others)
        return function

    return declare


def stages(*names: str) -> Callable[[_Function], _Function]:
    """Call the method with each record of these stages, as (number, record); at "end" after all records, without one."""

    def mark(function: _Function) -> _Function:
        function.stages = names  # type: ignore[attr-defined]
        return function

    return mark


@cache
def catalogue() -> Mapping[str, Rule]:
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if f"{__name__}.{file.stem}" not in sys.modules:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    _declare(node)
    return dict(sorted(_DECLARED.items()))


def _declare(found: ast.FunctionDef) -> None:
    """What importing the function declares."""

    def function() -> None: ...

    function.__doc__ = ast.get_docstring(found)
    for one in reversed(found.decorator_list):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id in ("rule", "stages"):
            named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in one.keywords}
            decorator: Callable[..., Any] = rule if one.func.id == "rule" else stages
            decorator(*map(ast.literal_eval, one.args), **named)(function)


def sentence_of(name: str, layers: bool, plain: bool) -> Sentence:
    """What a rule says of a draft of several layers, of a plain language model, or of a single head."""
    found = catalogue()[name]
    return (found.of_layers if layers else found.of_plain if plain else None) or Sentence(found.section, found.sentence)


def rules_off(names: list[str] | None) -> frozenset[str]:
    """Rules to switch off. What happens to the engine or a kernel itself is not a comparison, and cannot be."""
    known = [name for name in catalogue() if not name.startswith(("engine.", "kernel."))] if names else []
    return frozenset(_check_name(name, known, "a rule that can be switched off") for name in names or ())


def find_rule(name: str) -> str:
    """A rule by its name. Raises InputError."""
    return _check_name(name, list(catalogue()), "a rule")


def _check_name(name: str, known: list[str], what: str) -> str:
    if name not in known:
        remedy = nearest(name, known, "docs/reference/rules.md")
        raise InputError(f"{name!r} is not {what}", consequence="nothing was run", remedy=remedy)
    return name


def tables() -> list[str]:
    """As Markdown: all rules, then what holds instead of a multi-layer draft, and of a plain language model."""
    rules = catalogue().items()
    every = [(name, one, Sentence(one.section, one.sentence)) for name, one in rules]
    layers = [(name, one, one.of_layers) for name, one in rules if one.of_layers]
    plain = [(name, one, one.of_plain) for name, one in rules if one.of_plain]
    head = ["| rule | section | weights | must hold |", "|---|---|---|---|"]
    return [
        "\n".join(head + [f"| `{name}` | {says.section} | {one.weights} | {says.sentence} |" for name, one, says in table])
        for table in (every, layers, plain)
    ]


def rules_json() -> bytes:
    """A list of objects: name, section of docs/explanation/design.md, sentence, weights and stages, and of_layers or of_plain
    where another sentence holds of a multi-layer draft or a plain language model."""
    rules = [{"name": name, **_plain(one)} for name, one in catalogue().items()]
    return msgspec.json.format(msgspec.json.encode(rules))


def _plain(of: Rule | Sentence) -> dict[str, object]:
    fields = of._asdict().items()
    return {key: _plain(one) if isinstance(one, Sentence) else one for key, one in fields if one is not None}
