"""docs/reference/json.md, made of the classes that commands print. After a change: `python -m tests.harness.json_page`."""

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct
from msgspec.structs import fields

from eagletwin.harness.commands.result import NO_RESULT, OLDER, SHAPES, FailedFacts, ResultFacts, SaidFacts

PAGE = Path(__file__).parents[2] / "docs/reference/json.md"
TYPES = {str: "string", int: "integer", float: "number", bool: "true or false", dict: "object", list: "list", NoneType: "null"}
ELSEWHERE = {
    "acceptance": "one object, acceptance.json: [its guide](../guide/acceptance.md)",
    "kernels": "one object: release, properties and faults; with `--list` a list of functions",
    "info ledger": "a list of entries, with the fields of `cases/entry.py`",
    "info rules": "a list of rules: `name`, `section`, `sentence`, `weights`, `stages`",
    "info models": "a list of recipes",
}


def page() -> str:
    """The page, in Markdown."""
    lines = [
        "# JSON",
        "",
        "Written by `python -m tests.harness.json_page` from `harness/commands/result.py`; a test compares the two, and others "
        "hold what commands print to it.",
        "",
        "With `--json` a command prints one JSON value on stdout, and nothing else, whatever its [exit code](exit-codes.md).",
        "What people read, and progress, go to stderr.",
        "Fields are added, and none is renamed or removed while `schema` stays as it is: a program reads past what it does not "
        "know.",
        "",
        f"{', '.join(f'`{name}`' for name in NO_RESULT)} has no `--json`: it runs a server.",
        "",
        "Every object begins with `schema`, 1 where its section says nothing else, and `exit_code`.",
        "",
        "| command | object |",
        "|---|---|",
        *(f"| `{name}` | [{shape.__name__}](#{shape.__name__.lower()}) |" for name, shape in SHAPES.items()),
        *(f"| `{name}` | {ELSEWHERE[name]} |" for name in OLDER),
        f"| any, that ends with an error | [{FailedFacts.__name__}](#failedfacts) |",
        f"| any, that ends before it has a result | [{SaidFacts.__name__}](#saidfacts) |",
        "",
    ]
    for shape in dict.fromkeys([*SHAPES.values(), FailedFacts, SaidFacts]):
        lines += [f"## {shape.__name__}", "", (shape.__doc__ or "").strip(), "", *_table(shape), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(shape: type[ResultFacts]) -> list[str]:
    hints = get_type_hints(shape, include_extras=True)
    of_all = get_type_hints(ResultFacts, include_extras=True)
    own = [one.name for one in fields(shape) if hints[one.name] != of_all.get(one.name)]
    rows = [f"| `{name}` | {_type(hints[name])} | {_meaning(hints[name])} |" for name in own]
    return ["| field | type | what |", "|---|---|---|", *rows]


def _type(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return _type(get_args(hint)[0])
    if get_origin(hint) in (UnionType,):
        return " or ".join(map(_type, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(hint))
    if hint is Any:
        return "any"
    plain = get_origin(hint) or hint
    return "object" if isinstance(plain, type) and issubclass(plain, Struct) else TYPES[plain]


def _meaning(hint: Any) -> str:
    metas = [meta for meta in get_args(hint)[1:] if isinstance(meta, Meta)] if get_origin(hint) is Annotated else []
    return metas[0].description or "" if metas else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} written")
