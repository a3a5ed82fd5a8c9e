"""Prompts from a file: token ids, or text that the target's own tokenizer takes apart.

One prompt a line. A line that begins with `{` is JSON: `input_ids` (a list) or `prompt` (a text); `completion_ids` or
`completion` go on with it, and are taken in place of what the target would say. Any other line is a prompt as it stands.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagletwin.harness.core.errors import EagletwinError, InputError

from .checkpoint import Checkpoint

MAX_LINES = 100_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and of what follows it if the file says so."""

    ids: tuple[int, ...]
    completion: tuple[int, ...] | None = None


def read_prompts(file: Path, target: Checkpoint, limit: int = MAX_LINES) -> list[Prompt]:
    """The prompts of a file, at most `limit`. Raises InputError for a file that cannot be read, a line that is neither, and a
    file without a prompt."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file} cannot be read: {error}",
            consequence="there are no prompts",
            remedy="name a text file with one prompt a line, or a line of JSON each",
        ) from error
    encode = _Encoder(target)
    found = [_prompt(line, f"{file}:{number}", encode) for number, line in enumerate(lines[:MAX_LINES], 1) if line.strip()]
    if not found:
        raise InputError(f"{file} has no prompt", consequence="nothing was measured", remedy="write one prompt a line")
    return found[:limit]


class _Encoder:
    """The target's tokenizer, loaded when a text needs it."""

    def __init__(self, target: Checkpoint) -> None:
        self._target, self._tokenizer = target, None

    def __call__(self, text: str) -> list[int]:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._target.folder, local_files_only=True)
            except Exception as error:  # of many libraries
                raise EagletwinError(
                    f"{self._target.folder} has no tokenizer that transformers can load: {str(error).splitlines()[0]}",
                    consequence="a prompt of text cannot be taken apart",
                    remedy='give token ids, a line of JSON each: {"input_ids": [1, 2, 3]}',
                ) from error
        tokenizer: Any = self._tokenizer
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids


def _prompt(line: str, where: str, encode: Callable[[str], list[int]]) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(tuple(encode(line)))
    try:
        said = json.loads(line)
        ids = said["input_ids"] if "input_ids" in said else encode(said["prompt"])
        after = said.get("completion_ids")
        if after is None and "completion" in said:
            after = encode(said["prompt"] + said["completion"])[len(ids) :]
        if not ids or not all(type(token) is int for token in [*ids, *(after or [])]):
            raise ValueError("a prompt is a list of one or more whole numbers")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{where} is no prompt: {error}",
            consequence="nothing was measured",
            remedy='write {"input_ids": [1, 2, 3]} or {"prompt": "..."}, or a line of plain text',
        ) from error
    return Prompt(tuple(ids), None if after is None else tuple(after))
