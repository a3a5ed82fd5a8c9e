"""Pages of docs/reference that say what the code says, and links and paths in documents, messages and docstrings."""

import re
from pathlib import Path

import pytest

from eagletwin.harness.core import errors
from eagletwin.harness.judge.rules import catalogue

from . import cli_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md", *sorted(DOCS.rglob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE = re.compile(r"`((?:harness|tests|cases|reference|requirements)/[a-z0-9_./]+)`")
_PATH = re.compile(r"\bdocs/[\w./-]*\w")


def test_the_list_of_commands_is_made_of_the_commands() -> None:
    assert cli_page.PAGE.read_text(encoding="utf-8") == cli_page.page(), "run: python -m tests.harness.cli_page"


def test_the_exit_codes_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \|", (DOCS / "reference/exit-codes.md").read_text(), re.MULTILINE)
    known = [value for name, value in vars(errors).items() if name.startswith("EXIT_")]
    assert [int(row) for row in rows] == sorted(known)


def test_every_section_that_a_report_cites_is_there() -> None:
    sections = set(re.findall(r"^##+ (\d+(?:\.\d+)?)", (DOCS / "explanation/design.md").read_text(), re.MULTILINE))
    told = [says for rule in catalogue().values() for says in (rule, rule.of_layers, rule.of_plain) if says is not None]
    cited = {part for says in told for part in says.section.split("-")}
    assert cited <= sections


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        if not re.match(r"[a-z]+:", target):
            path, _, heading = target.partition("#")
            other = (page.parent / path).resolve() if path else page
            assert other.exists(), target
            assert not heading or heading in _headings(other), target


def _headings(page: Path) -> set[str]:
    """What headings are called in links, as GitHub makes it."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_ours_that_a_page_names_exists(page: Path) -> None:
    for path in _FILE.findall(page.read_text()):
        assert (ROOT / path).exists(), path


def test_every_page_can_be_reached_from_the_index() -> None:
    seen, waiting = set[Path](), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen:
            seen.add(page)
            linked = [(page.parent / target.partition("#")[0]).resolve() for target in _LINK.findall(page.read_text())]
            waiting += [other for other in linked if other.suffix == ".md" and DOCS in other.parents and other.exists()]
    assert set(DOCS.rglob("*.md")) == seen
