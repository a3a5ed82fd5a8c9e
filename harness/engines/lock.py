"""releases.lock, read: which releases of SGLang are known, and which files make each of them and the packages that it pins."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("releases.lock")


@dataclass(frozen=True, slots=True)
class Section:
    """A folder of the cache, `kind`/`name`, and what pip is to put in it.

    pins  requirement (`name==version`) -> sha256 of the files that may serve it, one for each platform
    """

    kind: str
    name: str
    pins: dict[str, tuple[str, ...]]


def parse(text: str) -> dict[str, Section]:
    """The sections of a lock file, by "kind/name", in order.

    text: requirements with their hashes in pip's format; each section begins with a line `# [kind/name]`
    """
    sections: dict[str, Section] = {}
    pins: dict[str, tuple[str, ...]] = {}
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("# ["):
            kind, _, name = line.strip("# []").partition("/")
            pins = {}
            sections[f"{kind}/{name}"] = Section(kind, name, pins)
        elif line and not line.startswith("#"):
            requirement, *hashes = line.split()
            pins[requirement] = tuple(word.removeprefix("--hash=sha256:") for word in hashes)
    return sections


@cache
def lock() -> dict[str, Section]:
    """The sections of releases.lock."""
    return parse(FILE.read_text(encoding="utf-8"))


def releases() -> tuple[str, ...]:
    """The known releases, oldest first."""
    return tuple(section.name for section in lock().values() if section.kind == "releases")
