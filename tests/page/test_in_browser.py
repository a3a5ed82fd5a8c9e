"""Pages in a real browser: what shows, the keyboard, light, dark and narrow, hostile texts, and long time lines.

How long a page takes to open is in docs/guide/page.md: tests look at no clock."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from eagletwin.harness.check.argument import argue
from eagletwin.harness.core.records import ServedModel
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.page.render import html_of
from eagletwin.harness.page.run import run_page

from ..rows import long
from .conftest import Opened, serious
from .planted import HOSTILE, page, recorded

pytestmark = pytest.mark.slow
LONG = 2000  # rounds
SIZE = 5 << 20  # bytes that a page may have
ELEMENTS = 600  # that a browser lays out at once, however long the time line is


def put(folder: Path, text: str) -> Path:
    file = folder / "report.html"
    file.write_text(text, encoding="utf-8")
    return file


def long_recording() -> Trace:
    """A request of a server, of LONG rounds."""
    trace = recorded(LONG)
    served = ServedModel(vocab_size=1000)
    return Trace(replace(trace.header, served=served), trace.tensors)


@pytest.mark.parametrize(("width", "dark"), [(1200, False), *long((1200, True), (390, False))], ids=["light", "dark", "phone"])
def test_a_page_is_quiet_fits_and_can_be_read_by_all(chromium: Any, tmp_path: Path, width: int, dark: bool) -> None:
    opened = Opened(chromium, put(tmp_path, html_of(page())), width=width, dark=dark)
    opened.quiet()
    assert not opened.overflows
    ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) < 200) == dark
    assert serious(opened) == []


def test_axe_does_find_what_cannot_be_read(chromium: Any, tmp_path: Path) -> None:
    """So that the test above is known to be able to fail."""
    text = html_of(page()).replace("--ink: #1c1f24", "--ink: #f0f0f0")
    assert any("contrast" in one for one in serious(Opened(chromium, put(tmp_path, text))))


def test_the_first_wrong_record_is_marked_by_more_than_a_colour(chromium: Any, tmp_path: Path) -> None:
    shown = Opened(chromium, put(tmp_path, html_of(page()))).page
    assert shown.locator("#timeline button.wrong").all_inner_texts() == ["⚑ ≠ 1 of 3"]
    assert "the first of all" in shown.locator("#details").inner_text()
    assert shown.locator("td.wrong", has_text="89").first.inner_text() == "≠ 89"
    assert shown.locator("svg .wrong rect").count() == 1
    assert shown.locator("figure.actual svg .mark").text_content() == "≠ 9"
    assert [one.inner_text() for one in shown.locator("#details .tokens span").all()] == ["✓ 11", "✗ 20", "✗ 30", "+ 9"]


def test_arrow_keys_go_from_cell_to_cell_and_enter_chooses(chromium: Any, tmp_path: Path) -> None:
    shown = Opened(chromium, put(tmp_path, html_of(page()))).page
    shown.locator("#timeline button.wrong").focus()
    for key, told in (("ArrowRight", "a, iteration 3"), ("ArrowDown", "b, iteration 3"), ("ArrowLeft", "b, iteration 2")):
        shown.keyboard.press(key)
        shown.keyboard.press("Enter")
        assert shown.locator("#details p").first.inner_text() == told
    shown.keyboard.press("ArrowUp")
    assert shown.evaluate("document.activeElement.textContent") == "⚑ ≠ 1 of 3"


def test_a_table_is_narrowed_down_by_words_and_tags(chromium: Any, tmp_path: Path) -> None:
    shown = Opened(chromium, put(tmp_path, html_of(page()))).page
    rows, told = shown.locator(".filtered tbody tr:visible"), shown.locator(".filtered [data-count]")
    assert (rows.count(), told.inner_text()) == (10, "10 of 10 rows")
    shown.get_by_label("State").select_option("live")
    assert (rows.count(), told.inner_text()) == (5, "5 of 10 rows")
    shown.get_by_label("Find").fill("ENTRY-3")
    assert [row.inner_text().split("\t")[0] for row in rows.all()] == ["entry-3"]


def test_hostile_texts_are_shown_and_not_run(chromium: Any, tmp_path: Path) -> None:
    opened = Opened(chromium, put(tmp_path, html_of(page(HOSTILE))))
    shown = opened.page
    for cell in shown.locator("#timeline button.mark").all():
        cell.click()
    assert shown.locator("img").count() == 0
    assert shown.locator("script").count() == 2
    assert HOSTILE.replace("\u2028", "") in shown.locator("h1").inner_text().replace("\u2028", "")
    opened.quiet()


def test_the_page_s_policy_stops_a_program_that_is_not_ours(chromium: Any, tmp_path: Path) -> None:
    foreign = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    text = html_of(page()).replace("<h1>", f"<h1>{foreign}")
    opened = Opened(chromium, put(tmp_path, text))
    assert opened.page.title() != "run"
    assert any("Content Security Policy" in one for one in opened.said)


def test_of_a_long_recording_a_window_is_in_the_document_and_the_rest_a_key_away(chromium: Any, tmp_path: Path) -> None:
    trace = long_recording()
    equal = Verdict(status="equal", checked={"verify.accept": LONG})
    text = html_of(run_page(trace, equal, argument=argue(trace.header, equal)))
    assert len(text.encode()) < SIZE
    opened = Opened(chromium, put(tmp_path, text))
    opened.quiet()
    shown = opened.page
    assert shown.evaluate("document.getElementsByTagName('*').length") < ELEMENTS
    assert shown.locator("#timeline button.mark").count() <= 32
    assert f"of 0 to {LONG + 1}" in shown.locator(".controls .note").inner_text()
    shown.get_by_role("button", name="Last", exact=True).click()
    assert shown.locator("#timeline button.end").count() == 1
    shown.get_by_role("spinbutton").fill("1500")
    shown.keyboard.press("Enter")
    assert shown.locator("#timeline thead th").nth(1).inner_text() == "1500"
    shown.locator("#timeline button.mark").first.focus()
    for _ in range(40):
        shown.keyboard.press("ArrowRight")
    assert shown.evaluate("document.activeElement.dataset.column") == "1540"
