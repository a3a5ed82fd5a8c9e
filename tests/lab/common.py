"""What commands of the laboratory share: the checkout, a line of progress, and answers that are kept as lines of JSON."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eagletwin.cases.entry import Known
from eagletwin.harness.commands.options import log_progress
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.terminal import Line

# Processes of the laboratory: it is no part of the package, and is found from the root of the checkout alone.

ROOT = Path(__file__).parents[2]


def module(name: str, *words: str) -> list[str]:
    """The command that runs a module of the laboratory. Its current folder must be ROOT."""
    return [sys.executable, "-m", name, *words]


# What a command of the laboratory says while it works.


def telling(line: Line) -> Callable[[str], None]:
    """Print to stderr, as it comes; on a terminal the line of progress counts it and repeats the last."""

    def say(text: str) -> None:
        log_progress(text)
        line.done(text)

    return say


# Answers about entries of the ledger, in a page: entries that have the same answers share a row.


def shared_rows(answers: Sequence[tuple[Known, str]]) -> Iterator[str]:
    """Rows of a table: the entries, the rules that they break, each once or in the entries' order, and their answers."""
    same: dict[str, list[Known]] = {}
    for entry, words in answers:
        same.setdefault(words, []).append(entry)
    for words, entries in same.items():
        names = ", ".join(f"{entry.id}{'' if entry.fixed else ' (live)'}" for entry in entries)
        rules = [entry.rule for entry in entries]
        yield f"| {names} | {', '.join(rules if len({*rules}) > 1 else rules[:1])} | {words} |"


def shorter(why: str) -> str:
    """A reason, as engines and commands say it, in fewer words."""
    for long, short in (
        ("SGLang does not run this configuration: ", "SGLang refuses it: "),
        ("eagletwin does not run this configuration: ", "eagletwin refuses it: "),
        ("not reached in this mode: it needs ", "needs "),
        (": this release has it otherwise (0.5.23 is known): ", ": not as in 0.5.23: "),
        (" (the function's source is taken without the indentation of its def)", ""),
    ):
        why = why.replace(long, short)
    return why


# Answers about entries of the ledger, as one file of JSON lines.
#
# The first line has all subjects (releases, or models), each other line one entry: its answers, and the subjects of each. Where
# that is shorter, one answer names the subjects that have none. 1,800 answers take 40 kB, and a new one changes few lines. One
# run at a time may write a file.


class Answer(Struct, frozen=True, omit_defaults=True, array_like=True):
    """One answer about an entry.

    own  its fields that other answers do not share
    of   the subjects that gave it; None: those that the line does not name
    but  subjects that gave no answer, of an answer without `of`
    """

    own: dict[str, Any]
    of: str | None = None
    but: str = ""


class EntryLine(Struct, frozen=True, omit_defaults=True):
    """All answers about an entry. all: the fields that these have in common"""

    entry: str
    all: dict[str, Any]
    answers: tuple[Answer, ...]


class Subjects(Struct, frozen=True):
    """The first line."""

    subjects: str


def read_answers(file: Path, kind: Any, consequence: str) -> dict[str, dict[str, Any]]:
    """By subject and entry; empty, if there is no file. kind: the type of an answer. Raises InputError for a file of another
    kind."""
    found: dict[str, dict[str, Any]] = {}
    if not file.exists():
        return found
    try:
        first, *rest = file.read_bytes().splitlines()
        subjects = msgspec.json.decode(first, type=Subjects).subjects.split()
        for line in (msgspec.json.decode(one, type=EntryLine) for one in rest):
            named = {subject for one in line.answers for subject in f"{one.of or ''} {one.but}".split()}
            for one in line.answers:
                answer = msgspec.convert(line.all | one.own, kind)
                of = [subject for subject in subjects if subject not in named] if one.of is None else one.of.split()
                for subject in of:
                    found.setdefault(subject, {})[line.entry] = answer
    except (msgspec.MsgspecError, OSError, ValueError) as error:
        raise InputError(f"{file}: {error}", consequence=consequence, remedy="remove the file") from error
    return found


def write_answers(file: Path, answers: Mapping[str, Mapping[str, Struct]]) -> None:
    """Write them, in place of the file. Answers must be frozen structs without a list or dict."""
    found: dict[str, dict[Struct, list[str]]] = {}
    for subject, by_entry in answers.items():
        for entry, answer in by_entry.items():
            found.setdefault(entry, {}).setdefault(answer, []).append(subject)
    lines = [_entry_line(entry, by_answer, list(answers)) for entry, by_answer in sorted(found.items())]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(msgspec.json.Encoder().encode_lines([Subjects(" ".join(answers)), *lines]))
    partial.replace(file)


def _entry_line(entry: str, by_answer: Mapping[Struct, Sequence[str]], subjects: Sequence[str]) -> EntryLine:
    fields = [msgspec.to_builtins(answer) for answer in by_answer]
    common = {name: value for name, value in fields[0].items() if all(each.get(name) == value for each in fields)}
    own = [{name: value for name, value in each.items() if name not in common} for each in fields]
    names = [" ".join(of) for of in by_answer.values()]
    answered = {subject for of in by_answer.values() for subject in of}
    but = " ".join(subject for subject in subjects if subject not in answered)
    rest = max(names, key=len)
    shorter = len(but) < len(rest)
    answers = (
        Answer(each, None, but) if of == rest and shorter else Answer(each, of) for each, of in zip(own, names, strict=True)
    )
    return EntryLine(entry, common, tuple(answers))
