"""A comparison as a comment of a pull request, in GitHub's Markdown.

Names of cases come from eagletwin, and all else from trees, paths and messages of exceptions that others wrote: whatever it is,
it is shown as it is, ends no table cell and no code span, and is no tag, no link and no mention of a person.
"""

import html
import re
from collections.abc import Sequence

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, pretty_case
from eagletwin.harness.core.terminal import count

from .groups import Answered, Breakage, Example, Group
from .report import NAMES, NOT_LOOKED_AT, SHOWN, Comparing, answer_text, breakage_text

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
    sentence = plain(one.sentence)
    lines = [f"## eagletwin: {plain(one.headline.lower())}", ""]
    lines += [sentence if one.interrupted and not one.broken else f"**{sentence}**", ""]
    lines += [f"**Not seen**: {plain(one.not_seen)}.", ""] if one.not_seen else []
    for broken, example in one.broken:
        lines += _broken(one, broken, example)
    lines += _table([_row(one, answer) for group in SHOWN for answer in one.listed(group)])
    lines += [f"HEAD is SGLang {code(one.versions[1])}, BASE {code(one.versions[0])}.", plain(one.asked)]
    lines += [plain(one.known_text), ""] if one.known_text else [""]
    lines += [*_functions(one), *_accepted(one), ""]
    lines += folded(NOT_LOOKED_AT, one.not_looked_at) if one.not_looked_at else []
    return "\n".join([*lines, f"Again: {code(one.run.command('compare', 'BASE', 'HEAD', *one.words))}"])


def _table(rows: list[str]) -> list[str]:
    if not rows:
        return []
    lines = ["| | case | what | again |", "|---|---|---|---|", *rows[:MOST_ROWS]]
    lines += ["", f"{count(len(rows) - MOST_ROWS, 'more row')} in comparison.json."] if len(rows) > MOST_ROWS else []
    return [*lines, ""]


def _broken(one: Comparing, broken: Breakage, example: Example) -> list[str]:
    """What HEAD breaks in one way: rule and place, and the smallest case as a file that anybody can run."""
    names, more = ", ".join(map(code, broken.names[:NAMES])), len(broken.names) - NAMES
    lines = [f"### {plain(str(broken.signature))}", "", *map(plain, breakage_text(broken, example))]
    lines += [f"In {count(len(broken.answers), 'case')}: {names}{f' and {more} more' if more > 0 else ''}.", ""]
    question = broken.first.question
    if question.entry is not None:
        return [*lines, f"Again: {_again(one, answer=broken.first)}", ""]
    run = replace(one.run, sglang="HEAD", view=question.view, changes=example.changes)
    return [*lines, *case_lines(example.case), "", f"As {code('case.json')}: {code(run.command('check', 'case.json'))}", ""]


def case_lines(case: Case) -> list[str]:
    """A case as its file has it. No string of a case has a backtick."""
    return ["```json", pretty_case(case).strip(), "```"]


def _again(one: Comparing, answer: Answered) -> str:
    """What to type for an entry. Of a generated case the run folder alone has the file."""
    entry, side = answer.question.entry, "BASE" if answer.group == "newly fixed" else "HEAD"
    if entry is None:
        return ""
    return code(replace(one.run, sglang=side, view=answer.question.view).command("check", entry.id))


def _row(one: Comparing, answer: Answered) -> str:
    group: Group = answer.group
    said = "<br>".join(plain(line) for line in answer_text(answer))
    return f"| {_BESIDES.get(group, group)} | {code(answer.question.name)} | {said} | {_again(one, answer)} |"


def _functions(one: Comparing) -> list[str]:
    sides = [changes.differs for changes in one.changes if changes.differs is not None]
    ran = {name for differs in sides for name in differs.ran}
    idle = {name for differs in sides for name in differs.idle} - ran
    listed = one.functions(MOST_NAMES)
    title = f"Changed functions: {len(ran)} run, {len(idle)} not run" if listed else "Changed functions: not known"
    return folded(title, listed or [one.no_functions])


def folded(title: str, texts: Sequence[str]) -> list[str]:
    """A list that is shown where somebody opens it."""
    return ["<details>", f"<summary>{title}</summary>", "", *(f"* {plain(text)}" for text in texts), "", "</details>", ""]


def _accepted(one: Comparing) -> list[str]:
    if not one.accepted:
        return ["Tokens a round commits: no generated case ran to its end on both sides."]
    lines = ["Tokens a round commits, over the generated cases that ran on both sides:", ""]
    lines += ["| model | shape | cases | BASE | HEAD | |", "|---|---|---:|---:|---:|---|"]
    for accepted in one.accepted:
        base, head, change = accepted.text
        change = f"**{change}**" if accepted.fell else change
        lines.append(f"| {code(accepted.model)} | {accepted.shape} | {accepted.cases} | {base} | {head} | {change} |")
    return lines
