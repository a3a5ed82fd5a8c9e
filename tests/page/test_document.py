"""One document as text, as a comment and as a page: what each of them has of it."""

from msgspec.structs import replace

from eagletwin.harness.page.document import Document, DocumentSection, Item, TableCell, row, table
from eagletwin.harness.page.render import MOST_ROWS, html_of, markdown_of, text_of

ITEM = Item(
    title="draft.kv, 2 cases: one, two",
    lines=("HEAD: wrong.", "Smallest: small."),
    again="eagletwin check /a/case.json",
    portable="eagletwin check case.json",
    case='{"name": "one"}\n',
    folder="/a/folder",
    href="folder/report.html",
)
ROUNDS = table(
    "Rounds", ("model", "change", "all"), [("llama-tiny", TableCell("-3%", "wrong"), "x1"), ("llama-mtp", "same", "x2")], more=1
)
WHOLE = Document(
    title="HEAD against BASE",
    status="1 newly broken",
    headline="HEAD is wrong where BASE is right.",
    lines=("Two cases ran.",),
    facts=(("HEAD", "SGLang 0.5.23"),),
    reason="1 of 2 changed statements did not run",
    sections=(
        DocumentSection(heading="Newly broken", items=(ITEM,), found=True),
        DocumentSection(heading="Newly fixed", items=(Item(title="three", lines=("BASE: wrong.",), portable="check 3"),)),
        DocumentSection(heading="Acceptance", tables=(ROUNDS,)),
        DocumentSection(
            heading="Not looked at", lines=("trees", "grammars"), folded="Not looked at", brief="Not looked at: 2."
        ),
        DocumentSection(heading="All cases", tables=(table("Cases", ("case",), [("one",)], detail=True),), brief=""),
        DocumentSection(heading="Nothing"),
    ),
    again=("eagletwin compare /a/base /a/head",),
    portable="eagletwin compare BASE HEAD",
    folder="/a/run",
    end="Exit code 1: newly broken.",
)


def test_the_text_has_each_section_in_short_or_in_full_and_ends_with_the_exit_code() -> None:
    text = text_of(WHOLE, 60)
    assert text.splitlines()[:11] == [
        "1 NEWLY BROKEN  HEAD against BASE",
        "NOT SEEN  1 of 2 changed statements did not run",
        "",
        "  HEAD is wrong where BASE is right.",
        "  Two cases ran.",
        "",
        "  Newly broken:",
        "    draft.kv, 2 cases: one, two",
        "      HEAD: wrong.",
        "      Smallest: small.",
        "      again:  eagletwin check /a/case.json",
    ]
    assert "    three: BASE: wrong.\n" in text
    assert "│ llama-tiny │ -3%    │" in text
    assert "\n  Not looked at: 2.\n" in text
    assert "grammars" not in text
    assert "\n    grammars\n" in text_of(WHOLE, 60, verbose=True)
    assert "Nothing" not in text
    assert "x1" not in text
    assert text.splitlines()[-4:] == [
        "  Exit code 1: newly broken.",
        "  again:  eagletwin compare /a/base /a/head",
        "  folder: /a/run",
        "  page:   /a/run/report.html",
    ]


def test_the_comment_begins_with_what_was_found_and_has_no_path() -> None:
    text = markdown_of(WHOLE)
    for part in (
        "## eagletwin: 1 newly broken\n\n**HEAD is wrong where BASE is right.**\n\n**Not seen**: 1 of 2 changed statements",
        '### draft.kv, 2 cases: one, two\n\nHEAD: wrong.\nSmallest: small.\n\n```json\n{"name": "one"}\n```\n',
        "As `case.json`: `eagletwin check case.json`\n",
        "| newly fixed | `three` | BASE: wrong. | `check 3` |",
        "| llama-tiny | **-3%** |",
        "<summary>Not looked at</summary>\n\n* trees\n* grammars\n\n</details>",
        "* HEAD: SGLang 0.5.23\n",
    ):
        assert part in text
    assert "/a/" not in text
    assert "x1" not in text
    assert text.index("### draft.kv") < text.index("Two cases ran.")
    assert text.endswith("Again: `eagletwin compare BASE HEAD`")


def test_a_comment_has_so_many_rows_and_says_how_many_more_there_are() -> None:
    items = tuple(Item(title=f"case-{number}", lines=("wrong",)) for number in range(MOST_ROWS + 2))
    text = markdown_of(replace(WHOLE, sections=(DocumentSection(heading="Unknown", items=items),)))
    assert text.count("| unknown |") == MOST_ROWS
    assert "2 more rows on the page." in text


def test_the_page_has_all_of_it_but_what_is_empty() -> None:
    text = html_of(WHOLE)
    for part in (
        '<p class="status doubt">1 NEWLY BROKEN</p>',
        '<h3><a href="folder/report.html">draft.kv, 2 cases: one, two</a></h3>',
        "<p>Smallest: small.</p>",
        '<pre tabindex="0">eagletwin check /a/case.json</pre>',
        "<caption>Cases</caption>",
        "<td>x1</td>",
        "<p>grammars</p>",
        "<p>Exit code 1: newly broken.</p>",
    ):
        assert part in text
    assert ">Nothing<" not in text
    assert '<p class="status wrong">' in html_of(replace(WHOLE, kind="wrong"))
    assert '<p class="status right">' in html_of(replace(WHOLE, status="equal"))


def test_a_filter_that_no_row_has_is_left_out() -> None:
    rows = [row("a", tags=("live",)), row("b", tags=("fixed",))]
    made = table("Entries", ("entry",), rows, filters=(("State", ("live", "gone", "fixed")),))
    assert made.filters == (("State", ("live", "fixed")),)
