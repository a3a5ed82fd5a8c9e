"""Answers about entries of the ledger, written as the file of JSON lines that the product reads."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from eagletwin.harness.commands.page_facts import AnswerLine


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
