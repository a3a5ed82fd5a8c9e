"""A comparison as a comment of a pull request, in GitHub's Markdown.

Names of cases come from eagletwin, and all else from trees, paths and messages of exceptions that others wrote: whatever it is,
it is shown as it is, ends no table cell and no code span, and is no tag, no link and no mention of a person.
"""

import html
import re

from eagletwin.harness.core.words import count

from .groups import Answered, Breakage, Group
from .report import NAMES, SHOWN, Comparing, answer_text, breakage_text
from .smallest import Example

MOST_ROWS, MOST_NAMES = 40, 60  # GitHub takes 65,536 letters
# Markup of GitHub's, with its mentions (@), references (#), mathematics ($), emoji and addresses (a colon within a word, www.).
# An underscore within a word is none.
_WORD = "[A-Za-z0-9]"
_SPECIAL = re.compile(rf"[\\`*\[\]#|~@$]|(?<!{_WORD})_|_(?!{_WORD})|:(?=\S)|(?<=www)\.", re.IGNORECASE)
_UNSAFE_IN_CODE = re.compile(r"[`|\\]")
_BESIDES = {"still diverged": "still diverged, as before", "unknown": "unknown on a side"}


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


def markdown_of(one: Comparing) -> str:
    """The whole comment."""
    result = one.result
    sides = f"HEAD {code(one.names[1])} ({code(one.versions[1])}) against BASE {code(one.names[0])} ({code(one.versions[0])})"
    lines = [f"## eagletwin: {plain(one.headline.lower())}", "", f"**{plain(result.sentence)}**", ""]
    lines += [f"{sides}.", plain(one.asked), ""]
    shown = [answer for group in SHOWN for answer in result.answers if answer.group == group]
    as_before = [_row(answer) for answer in shown if answer.group == "still diverged"]
    rows = [_broken(*pair) for pair in one.broken] + [_row(answer) for answer in shown if answer.group != "still diverged"]
    lines += _table(rows)
    if as_before:
        lines += ["<details>", f"<summary>{count(len(as_before), 'case')} still diverged, as before</summary>", ""]
        lines += [*_table(as_before), "</details>", ""]
    return "\n".join([*lines, *_functions(one), "", *_accepted(one), "", f"Again: {code(one.command)}"])


def _table(rows: list[str]) -> list[str]:
    if not rows:
        return []
    lines = ["| | case | what is wrong | again |", "|---|---|---|---|", *rows[:MOST_ROWS]]
    lines += ["", f"{count(len(rows) - MOST_ROWS, 'more row')} in comparison.json."] if len(rows) > MOST_ROWS else []
    return [*lines, ""]


def _broken(broken: Breakage, example: Example) -> str:
    """What HEAD breaks in one way, with its smallest case and the names of all."""
    cases = f"{count(len(broken.answers), 'case')}: {', '.join(map(code, broken.names[:NAMES]))}"
    more = len(broken.names) - NAMES
    cases += f" and {more} more" if more > 0 else ""
    said = "<br>".join(plain(line) for line in breakage_text(broken, example))
    return f"| **newly broken** | {plain(str(broken.signature))}<br>{cases} | {said} | {code(example.again)} |"


def _row(answer: Answered) -> str:
    group: Group = answer.group
    word = _BESIDES.get(group, group)
    said = "<br>".join(plain(line) for line in answer_text(answer))
    return f"| {word} | {code(answer.question.name)} | {said} | {code(answer.again)} |"


def _functions(one: Comparing) -> list[str]:
    sides = [changes.differs for changes in one.changes if changes.differs is not None]
    ran = {name for differs in sides for name in differs.ran}
    idle = {name for differs in sides for name in differs.idle} - ran
    listed = one.functions(MOST_NAMES)
    title = f"Changed functions: {len(ran)} run, {len(idle)} not run" if listed else "Changed functions: not known"
    lines = ["<details>", f"<summary>{title}</summary>", ""]
    for side, texts in listed:
        lines += [f"{side}:", "", *(f"* {plain(text)}" for text in texts), ""]
    lines += [] if listed else [one.no_functions, ""]
    return [*lines, "</details>"]


def _accepted(one: Comparing) -> list[str]:
    if not one.accepted:
        return ["Tokens a round commits: no generated case ran to its end on both sides."]
    lines = ["Tokens a round commits, over the generated cases that both sides finished:", ""]
    lines += ["| model | shape | cases | BASE | HEAD | |", "|---|---|---:|---:|---:|---|"]
    for accepted in one.accepted:
        base, head, change = accepted.text
        change = f"**{change}**" if accepted.fell else change
        lines.append(f"| {code(accepted.model)} | {accepted.shape} | {accepted.cases} | {base} | {head} | {change} |")
    return lines
