"""Documents are plain technical English: words and beginnings of sentences that make a sentence be read twice are banned.

BANNED is the one list. Reports in the folders of docs/findings are read, pages beside these folders are not.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

BANNED = {
    # A capital begins a sentence, a heading or a cell: the subject comes first.
    "a beginning that hides the subject": r"\b(?:What|Whatever|Whose|Of)\b",
    "a pronoun without a noun": r"\b[Oo]thers\b|\b[Oo]therwise\b",
    "'so' as a pronoun": r"\b(?:do|does|did|done|say|says|said|is|are|was|were|be|treated|compared|found|lose) so\b(?! that\b)",
    "a passive without an actor": r"\b(?:is|are|was|were|be|been|being) (?:not |never )?(?:told|asked|given|held to)\b",
    "'behind' in place of 'after'": r"\bbehind\b(?! (?:a condition\b|`))",
}

# Written by a command from the code, and compared with it: to be mended there.
GENERATED = ("docs/reference/cli.md", "docs/reference/json.md", "docs/records/releases.md", "docs/records/models.md")
# Rows of tables that repeat strings of the code, word for word, by a test: names of features, rules, ledger entries, faults.
REPEATED = (
    "docs/reference/case.md",
    "docs/reference/rules.md",
    "docs/guide/acceptance-fell.md",
    "docs/guide/recording.md",
)
PAGES = sorted({*ROOT.glob("*.md"), *DOCS.rglob("*.md")})


def prose(text: str, *, tables: bool = True) -> str:
    """A text without its code, links' targets, and other people's words: quotations, and lists of SGLang's reports by title."""
    text = re.sub(r"^( *)```.*?^\1```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\* \[.*\]\(findings/.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"``.+?``|`[^`\n]*`", "`", text)
    text = re.sub(r'\]\([^)\s]*\)|"[^"\n]*"', "", text)
    return text if tables else re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)


def found(text: str, *, tables: bool = True) -> list[tuple[int, str, str]]:
    """Each banned word: its line, from 1, why it is banned, and the words."""
    lines = prose(text, tables=tables).split("\n")
    hits = (
        (number, why, hit[0])
        for number, line in enumerate(lines, 1)
        for why, ban in BANNED.items()
        for hit in re.finditer(ban, line)
    )
    return sorted(hits)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_document_has_no_banned_words(page: Path) -> None:
    name = page.relative_to(ROOT).as_posix()
    if name not in GENERATED:
        assert found(page.read_text(encoding="utf-8"), tables=name not in REPEATED) == []


def test_pages_that_are_left_out_are_there() -> None:
    assert {ROOT / name for name in (*GENERATED, *REPEATED)} <= set(PAGES)


def test_each_ban_finds_its_sentence() -> None:
    sentences = {
        "What is equal is known.": "What",
        "| cell | Of a chain, two rows. |": "Of",
        "* **Whose number it is**": "Whose",
        "Two of them pass, the others fail.": "others",
        "It crashes where SGLang does otherwise.": "otherwise",
        "Trees are not compared, and the report says so.": "says so",
        "The judge is told the choice.": "is told",
        "Each request is given a slot.": "is given",
        "The worker is held to the rule.": "is held to",
        "It stands behind the prompt.": "behind",
    }
    assert {text: [words for _, _, words in found(text)] for text in sentences} == {
        text: [words] for text, words in sentences.items()
    }


def test_code_and_plain_sentences_pass() -> None:
    assert (
        found("Run `What`.\n\n```\nWhose otherwise\n```\n\nSo the rows are kept, and the kernel behind `.is_cuda` runs.") == []
    )
    assert found("| `Of` | told |\n\n| rule | What others |", tables=False) == []
