"""docs/reference/cli.md, made of the commands themselves. After a change of a command: `python -m tests.harness.cli_page`."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagletwin.harness.cli.main import command_tree

PAGE = Path(__file__).parents[2] / "docs/reference/cli.md"
SHARED = 3  # options that so many commands have, word for word, are listed once

Row = tuple[str, str]  # an option or argument, and its meaning


def page() -> str:
    """The page, in Markdown: every command, its arguments and its options."""
    root: Any = command_tree()
    context = root.make_context("eagletwin", ["info"], resilient_parsing=True)
    commands = list(_commands(root, context, "eagletwin"))
    rows = {name: [_row(param, context) for param in command.params if not param.hidden] for name, command in commands}
    counts = Counter(row for found in rows.values() for row in found if row[0].startswith("`-"))
    shared = {row: None for found in rows.values() for row in found if counts[row] >= SHARED}
    lines = [
        "# Commands",
        "",
        "Written by `python -m tests.harness.cli_page` from the commands themselves; a test compares the two.",
        "Exit codes: [exit-codes.md](exit-codes.md). Cases: [case.md](case.md).",
        "",
        ", ".join(f"[{name.removeprefix('eagletwin ')}](#{name.replace(' ', '-')})" for name, _ in commands) + ".",
        "",
    ]
    for name, command in commands:
        own = [row for row in rows[name] if row not in shared]
        common = [row[0] for row in rows[name] if row in shared]
        lines += [f"## {name}", "", *_sentences(command.help or ""), ""]
        lines += _table(own)
        lines += (
            [f"Also, of the [common options](#common-options): {', '.join(_short(word) for word in common)}.", ""]
            if common
            else []
        )
    lines += ["## Common options", "", *_table(list(shared))]
    return "\n".join(lines).rstrip() + "\n"


def _commands(group: Any, context: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from _commands(command, context, f"{path} {name}")
        elif not command.hidden:
            yield f"{path} {name}", command


def _row(param: Any, context: Any) -> Row:
    record = param.get_help_record(context)
    if param.param_type_name == "argument":
        name, text = param.metavar or param.name.upper(), (record[1] if record else param.help or "")
    else:
        name, text = record
    name = re.sub(r"<(\w+) range>", r"<\1>", name)
    return f"`{_cell(name)}`", _cell(re.sub(r"\s+", " ", text).replace(" [required]", ""))


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|")


def _table(rows: list[Row]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows), ""] if rows else []


def _short(name: str) -> str:
    """`--view <a|b>` as `--view`."""
    return f"`{re.split('[ ,]', name.strip('`'))[0]}`"


def _sentences(text: str) -> list[str]:
    """One sentence a line."""
    return re.sub(r"(?<=[\w)][.:?]) (?=[A-Z`0-9])", "\n", " ".join(text.split())).split("\n")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} written")
