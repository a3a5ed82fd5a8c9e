"""A document as a comment of a pull request, or the summary of a job, in GitHub's Markdown.

Names of cases come from eagletwin, and all else from trees, paths and messages of exceptions that others wrote: whatever it is,
it is shown as it is, ends no table cell and no code span, and is no tag, no link and no mention of a person.
"""

import html
import re
from collections.abc import Iterator

from eagletwin.harness.core.terminal import count

from .document import Document, DocumentSection, Item, Table, TableCell

MOST_ROWS = 40  # GitHub takes 65,536 letters
# Markup of GitHub's, with its mentions (@), references (#), mathematics ($), emoji and addresses (a colon within a word, www.).
# An underscore within a word is none.
_WORD = "[A-Za-z0-9]"
_SPECIAL = re.compile(rf"[\\`*\[\]#|~@$]|(?<!{_WORD})_|_(?!{_WORD})|:(?=\S)|(?<=www)\.", re.IGNORECASE)
_UNSAFE_IN_CODE = re.compile(r"[`|\\]")


def plain(text: str) -> str:
    """Text that is nothing but text, on one line."""
    line = " ".join(text.split())
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", html.escape(line, quote=False))


def code(text: str) -> str:
    """Text in the letters of code, on one line, in a table cell too."""
    line = " ".join(text.split())
    if not line:
        return ""
    # no backslash hides a backtick in a code span, and where a pipe is escaped depends on who reads the table
    return f"<code>{plain(line)}</code>" if _UNSAFE_IN_CODE.search(line) else f"`{line}`"


def markdown_of(document: Document) -> str:
    """The whole comment: what was found, with its case; what else came out; what ran. No path of this machine is in it,
    unless a sentence names one."""
    sections = document.filled.sections
    lines = [f"## eagletwin: {plain(document.status.lower())}", "", f"**{plain(document.headline)}**", ""]
    lines += [f"**Not seen**: {plain(document.reason)}.", ""] if document.reason else []
    for item in (item for section in sections if section.found for item in section.items):
        lines += _finding(item)
    lines += _rows([(section, item) for section in sections if not section.found for item in section.items])
    lines += [*map(plain, document.lines), ""] if document.lines else []
    for section in sections:
        lines += _section(section)
    lines += [*(f"* {plain(name)}: {plain(value)}" for name, value in document.facts), ""] if document.facts else []
    return "\n".join([*lines, f"Again: {code(document.portable)}"])


def _finding(item: Item) -> list[str]:
    """Rule and place, and the smallest case as a file that anybody can run."""
    lines = [f"### {plain(item.title)}", "", *map(plain, item.lines), ""]
    if not item.case:
        return [*lines, *[f"Again: {code(item.portable)}", ""] * bool(item.portable)]
    # no string of a case has a backtick
    return [*lines, "```json", item.case.strip(), "```", "", f"As {code('case.json')}: {code(item.portable)}", ""]


def _rows(items: list[tuple[DocumentSection, Item]]) -> list[str]:
    if not items:
        return []
    lines = ["| | what | | again |", "|---|---|---|---|"]
    for section, item in items[:MOST_ROWS]:
        said = "<br>".join(map(plain, item.lines))
        lines.append(f"| {plain(section.heading.lower())} | {code(item.title)} | {said} | {code(item.portable)} |")
    return [*lines, *[f"\n{count(len(items) - MOST_ROWS, 'more row')} on the page."] * (len(items) > MOST_ROWS), ""]


def _section(section: DocumentSection) -> Iterator[str]:
    shown = [table.short for table in section.tables if not table.detail]
    if section.folded and section.lines:
        yield from ("<details>", f"<summary>{plain(section.folded)}</summary>", "")
        yield from (f"* {plain(text)}" for text in section.lines)
        yield from ("", "</details>", "")
    elif section.lines and not section.items:
        yield from (*map(plain, section.lines), "")
    for table in shown:
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    yield from (f"{plain(table.caption)}:", "")
    yield f"| {' | '.join(map(plain, table.header))} |"
    yield "|---" * len(table.header) + "|"
    for one in table.rows[:MOST_ROWS]:
        yield f"| {' | '.join(map(_cell, one.cells))} |"
    yield ""


def _cell(cell: TableCell) -> str:
    return f"**{plain(cell.text)}**" if cell.kind == "wrong" else plain(cell.text)
