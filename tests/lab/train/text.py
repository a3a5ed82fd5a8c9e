"""The text that a pair is trained on: Python's own documentation and standard library, which every machine has.

Bytes are tokens, so no tokenizer is needed. A document is a topic of `help()` or a source file; each begins with BEGIN and ends
with END. Four spaces are one tab: a quarter of the bytes of a source is indentation, which a model foresees without effort, and
accept lengths would say little else. One document in twenty is held out of training.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from eagletwin.harness.core.errors import HarnessError

from .settings import BEGIN, END

HELD_OUT = 20
# Not text: tests, tables of characters, what other packages or this build of Python brought.
_SKIPPED = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
_MADE_BY_THE_BUILD = ("_sysconfigdata", "python-config")
# A Python without its sources has nothing but the topics, half a million bytes of prose.
_LEAST = 2_000_000


@dataclass(frozen=True, slots=True)
class Corpus:
    """training [N] and held_out [M]: tokens, int16, document after document; digest: of both."""

    training: Tensor
    held_out: Tensor
    digest: str


def standard_library() -> Corpus:
    """The same on every machine with the same Python. Raises HarnessError if its sources are not there."""
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number, document in enumerate(_documents(Path(sysconfig.get_path("stdlib")))):
        parts[number % HELD_OUT == HELD_OUT - 1].append(_tokens(document))
    training, held_out = map(torch.cat, parts)
    if len(training) < _LEAST:
        raise HarnessError(
            "this Python's standard library has no sources",
            consequence="there is no text to train on, and nothing was trained",
            remedy="use a Python whose library is installed as .py files",
        )
    digest = hashlib.sha256(training.numpy().tobytes() + held_out.numpy().tobytes()).hexdigest()
    return Corpus(training, held_out, digest)


def _documents(library: Path) -> Iterator[bytes]:
    for _, text in sorted(topics.items()):
        yield text.encode()
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).parts
        if not _SKIPPED & set(parts) and not file.name.startswith(_MADE_BY_THE_BUILD):
            yield file.read_bytes()


def _tokens(document: bytes) -> Tensor:
    """A document as tokens, int16."""
    return torch.tensor([BEGIN, *document.replace(b" " * 4, b"\t"), END], dtype=torch.int16)


def drawn_windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows of a text at random places [count, length], int64. tokens [N]."""
    starts = torch.randint(0, len(tokens) - length + 1, (count,), generator=generator)
    return _windows(tokens, starts, length)


def spread_windows(tokens: Tensor, count: int, length: int) -> Tensor:
    """Windows at even distances [count, length], int64: the same each time. tokens [N]."""
    return _windows(tokens, torch.arange(count) * ((len(tokens) - length) // count), length)


# Prompts to ask a server: 20 that no chunk of 8 tokens cuts, and 20 that chunks of 64 cut or not.
_SHORT, _LONG = (5, 6, 7, 8), (40, 80, 120, 160)
_OF_EACH, _ALIKE, _APART = 5, 5, 10


def prompts(held_out: Tensor) -> list[list[int]]:
    """Prompts out of a text [M], each behind BEGIN. Some long ones begin as an earlier one does and go on otherwise: the prefix
    cache has half of the shorter one."""
    sizes = (*_SHORT * _OF_EACH, *_LONG * _OF_EACH)
    windows = spread_windows(held_out, len(sizes), max(sizes)).tolist()
    found = [[BEGIN, *window[: size - 1]] for window, size in zip(windows, sizes, strict=True)]
    first = len(_SHORT) * _OF_EACH
    for earlier, later in zip(found[first : first + _ALIKE], found[first + _APART :], strict=False):
        shared = min(len(earlier), len(later)) // 2
        later[:shared] = earlier[:shared]
    return found


def _windows(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    return tokens[starts[:, None] + torch.arange(length)].long()


def frequent_tokens(tokens: Tensor, count: int, vocabulary: int) -> Tensor:
    """The `count` most frequent tokens of a text, in ascending order [count]. tokens [N]."""
    return tokens.long().bincount(minlength=vocabulary).argsort(descending=True, stable=True)[:count].sort().values
