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
    ):
        why = why.replace(long, short)
    return why


# Answers about entries of the ledger, as one file of JSON lines.
#
# A line has one answer and all subjects (releases, or models) that gave it: 1,800 answers take 70 kB, and a new one changes few
# lines. One run at a time may write a file.


class AnswerLine(Struct, frozen=True):
    """One answer about an entry. of: the releases or models that gave it"""

    entry: str
    of: tuple[str, ...]
    answer: Any


def read_answers(file: Path, kind: Any, consequence: str) -> dict[str, dict[str, Any]]:
    """By subject and entry; empty, if there is no file. kind: the type of an answer. Raises InputError for a file of another
    kind."""
    found: dict[str, dict[str, Any]] = {}
    if not file.exists():
        return found
    try:
        lines = msgspec.json.Decoder(AnswerLine).decode_lines(file.read_bytes())
        answers = [msgspec.convert(line.answer, kind) for line in lines]
    except (msgspec.MsgspecError, OSError) as error:
        raise InputError(f"{file}: {error}", consequence=consequence, remedy="remove the file") from error
    for line, answer in zip(lines, answers, strict=True):
        for subject in line.of:
            found.setdefault(subject, {})[line.entry] = answer
    return found


def write_answers(file: Path, answers: Mapping[str, Mapping[str, Struct]]) -> None:
    """Write them, in place of the file. Answers must be frozen structs without a list or dict."""
    lines: dict[str, dict[Struct, list[str]]] = {}
    for subject, by_entry in answers.items():
        for entry, answer in by_entry.items():
            lines.setdefault(entry, {}).setdefault(answer, []).append(subject)
    encoded = [
        AnswerLine(entry, tuple(subjects), answer)
        for entry, by_answer in sorted(lines.items())
        for answer, subjects in by_answer.items()
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(msgspec.json.Encoder().encode_lines(encoded))
    partial.replace(file)
