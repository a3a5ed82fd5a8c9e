"""What comments, docstrings and messages name must be there: documents, sections of the design, and files of ours."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("cases", "harness", "reference", "tests", "requirements")
TEXTS = (".py", ".in", ".toml", ".sh")
DESIGN = ROOT / "docs/explanation/design.md"

_DOCUMENT = re.compile(r"\bdocs/[\w/.-]*\w\.(?:md|svg|json)\b")
_SECTION = re.compile(r"\b(?:DESIGN §?|design §)(\d+(?:\.\d+)*)")
# Files of SGLang, and of flashinfer
_THEIRS = ("sglang/", "python/", "srt/", "kernels/ops/", "mem_cache/", "debug_utils/", "flashinfer/")
_FILE = re.compile(r"(?<![\w/.{}*-])(?:[a-z_0-9]+/)+[a-z_0-9]+\.py\b")


def sources() -> Iterator[Path]:
    for room in ROOMS:
        yield from (path for path in sorted((ROOT / room).rglob("*")) if path.suffix in TEXTS)
    yield from (ROOT / name for name in ("Makefile", "conftest.py", "pyproject.toml", ".gitignore", "tests/README.md"))


@cache
def sections() -> frozenset[str]:
    """The numbers of the design's headings."""
    return frozenset(re.findall(r"^#+ (\d+(?:\.\d+)*)\.? ", DESIGN.read_text(encoding="utf-8"), re.MULTILINE))


@cache
def files() -> frozenset[str]:
    """Our Python files, each by every end of its path: `harness/judge/replay.py`, `judge/replay.py`."""
    paths = (path.relative_to(ROOT).parts for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return frozenset("/".join(parts[at:]) for parts in paths for at in range(len(parts)))


def absent(text: str, *, ours: bool = True) -> list[str]:
    """What a text names that is not there. ours: its files are ours or SGLang's, and no test makes them up."""
    found = [name for name in _DOCUMENT.findall(text) if not (ROOT / name).exists()]
    found += [f"design §{number}" for number in _SECTION.findall(text) if number not in sections()]
    named = _FILE.findall(text) if ours else ()
    return found + [name for name in named if name not in files() and not name.startswith(_THEIRS)]


def test_what_a_source_file_names_is_there() -> None:
    found = {path: absent(path.read_text(encoding="utf-8"), ours=ROOT / "tests" not in path.parents) for path in sources()}
    assert {path: names for path, names in found.items() if names and path != Path(__file__)} == {}


def test_what_is_not_there_is_found() -> None:
    """As it stood in files of ours."""
    assert absent("docs/figures.md, docs/records/detection.md") == ["docs/figures.md"]
    assert absent("(DESIGN §9), design §3.8, DESIGN §10, DESIGN §2") == ["design §9", "design §10"]
    assert absent("models/eagle3.py, reference/draft_heads.py, judge/replay.py, srt/x.py") == ["models/eagle3.py"]


def test_a_word_has_one_meaning() -> None:
    """docs/words.md says so."""
    words = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/words.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {word: count for word, count in Counter(words).items() if count > 1 and word not in ("word", "---")} == {}


def test_no_comment_of_the_makefile_is_longer_than_a_line_of_code() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("#") and len(line) > 128] == []
