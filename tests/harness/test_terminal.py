"""What is printed fits the terminal, is coloured on a terminal only, and never breaks a word that a reader may copy."""

import os
import pty
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from eagletwin.harness.core import terminal
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.trace import new_header, write_trace
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.page.text import print_table

from ..rows import long, spread
from . import imported

COMMANDS = ("fuzz", "check", "prove", "bisect")


def environment(**settings: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return inherited | {"TERM": "xterm-256color"} | settings


def piped(*arguments: str, **settings: str) -> str:
    return imported.run(["-m", "eagletwin", *arguments], Path.cwd(), environment(**settings)).stdout


def typed(*arguments: str, **settings: str) -> str:
    """What a command prints on a terminal."""
    ours, theirs = pty.openpty()
    with Path(os.devnull).open("w") as nowhere:
        command = ["-m", "eagletwin", *arguments]
        imported.shared.start(command, Path.cwd(), environment(**settings), theirs, nowhere.fileno())
    os.close(theirs)
    printed = b""
    try:
        while data := os.read(ours, 65536):
            printed += data
    except OSError:  # the other end is closed
        pass
    imported.shared.ended()
    os.close(ours)
    return printed.decode()


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trace folder whose report has a long sentence."""
    folder = tmp_path_factory.mktemp("trace")
    case = Case(name="x", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
    engine = EngineInfo(name="none", version="0", device="cpu", kernels="none", torch="0", triton="0")
    ending = Ending(kind="crashed", detail="ValueError: " + "these are the words of an exception that was not expected " * 4)
    write_trace(folder, new_header(case, model_pair(case.model).digest, engine, ending, ()), {})
    return str(folder)


def reason(text: str) -> list[str]:
    """The lines of the folded sentence."""
    lines = text.replace("\r", "").split("\n")
    begin = next(number for number, line in enumerate(lines) if "engine.crash" in line)
    return lines[begin : lines.index("", begin)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "columns"), [({}, 80), ({"COLUMNS": "200"}, 200), *long(({"COLUMNS": "80"}, 80))], ids=str
)
def test_a_report_is_as_wide_as_the_terminal_and_80_columns_where_there_is_none(
    crashed: str, settings: dict[str, str], columns: int
) -> None:
    lines = reason(piped("judge", crashed, **settings))
    assert len(lines) > 1
    assert columns - 12 < max(map(len, lines)) <= columns


@pytest.mark.slow
def test_a_status_is_coloured_on_a_terminal_alone(crashed: str) -> None:
    assert re.match(r"\x1b\[[0-9;]+mUNKNOWN\x1b\[0m  x on SGLang 0", typed("judge", crashed))
    assert "\x1b" not in piped("judge", crashed)
    assert re.sub(r"\x1b\[[0-9;]*m", "", typed("judge", crashed, COLUMNS="90")).replace("\r", "") == piped(
        "judge", crashed, COLUMNS="90"
    )


@pytest.mark.slow
def test_no_color_is_honoured(crashed: str) -> None:
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", typed("judge", crashed, NO_COLOR="1"))


@pytest.mark.parametrize("name", spread(COMMANDS))
def test_help_has_panels_and_breaks_no_choice(name: str) -> None:
    text = piped(name, "--help", COLUMNS="80")
    assert "─ Engine: what runs ─" in text
    assert "─ Output and limits ─" in text
    assert ("─ Search" in text) == (name in ("fuzz", "bisect"))
    assert max(map(len, text.split("\n"))) <= 80
    words = set(re.findall(r"`(\w+)`", text))
    for choice in ("interpreter", "shadow", "checked"):
        assert choice in words
    if name != "prove":
        assert {"slot_layout", "true_tree", "last_fed", "committed"} <= words
    assert not re.search(r"<\w+\|", text)


ROW = ("multi-layer-chunk-tail-2", "0.5.9 - 0.5.12.post1", "equal", "diverged draft.proposal", "[green]holds[/]")
HEADER = ("entry", "in", "with the fix", "without it", "proof")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_table_breaks_no_word_and_is_no_wider_than_it_must_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table(HEADER, [ROW])
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    text = "\n".join(lines)
    for word in _words(ROW):
        assert word in text
    widest = max(map(len, lines))
    assert widest <= max(columns, sum(max(map(len, cell.split())) for cell in zip_words()) + 16)
    assert len(lines) == (5 if columns == 200 else len(lines))
    if columns == 200:
        assert widest < 130


def _words(row: Sequence[str]) -> list[str]:
    return [word for cell in row for word in cell.replace("[green]", "").replace("[/]", "").split()]


def zip_words() -> list[str]:
    """Of each column its header and its cell."""
    return [f"{name} {' '.join(_words([cell]))}" for name, cell in zip(HEADER, ROW, strict=True)]


def test_a_word_that_is_longer_than_the_line_stays_whole() -> None:
    path = "/tmp/" + "x" * 100
    assert terminal.fold(f"look at {path}", 40, "") == ["look at", path]


def test_the_first_line_alone_is_coloured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not a word of a command or of a file's name further down."""
    file = tmp_path / "out"
    with file.open("w") as stream:
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.delenv("NO_COLOR", raising=False)
        terminal.show("INTERRUPTED, 2 FOUND  seed 1\n\nEQUAL  x")
    assert re.fullmatch(r"INTERRUPTED, \x1b\[[0-9;]+m2 FOUND\x1b\[0m  seed 1\n\nEQUAL  x\n", file.read_text())


@pytest.mark.parametrize(
    ("columns", "left"), [("120", "120"), ("1000", "1000"), ("1001", None), ("9" * 30, None), ("-1", None), ("²", None)]
)
def test_columns_that_no_terminal_has_are_taken_out(monkeypatch: pytest.MonkeyPatch, columns: str, left: str | None) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    terminal.bound_columns()
    assert os.environ.get("COLUMNS") == left
