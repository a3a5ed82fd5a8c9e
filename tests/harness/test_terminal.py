"""What is printed fits the terminal, is coloured on a terminal alone, shows progress there, and knows the nearest name."""

import os
import pty
import re
import select
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from eagletwin.harness.core import terminal
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.terminal import nearest
from eagletwin.harness.core.trace import new_header, write_trace
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.page.render import print_table

from ..rows import long, spread
from . import imported

# What is printed fits the terminal, is coloured on a terminal only, and never breaks a word that a reader may copy.


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
    assert re.match(r"\x1b\[[0-9;]+mUNKNOWN\x1b\[0m  x on none 0", typed("judge", crashed))
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


# Progress on a terminal, and nothing of it anywhere else: in a pipe, in CI, on a dumb terminal.


ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from eagletwin.harness.core.terminal import each
for thing in each(["one[/]", "two", "three"], "things", str):
    print(f"worked on {thing}", file=sys.stderr)
    print("long " * 60)
"""
LONG = "long " * 60
# What `make findings` and `acceptance --server` print of two folders and four prompts; nothing is tried or compared here.
# They sleep where a line is looked for: it is drawn four times a second.
FINDINGS = f"""
import sys
import time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.findings import attempt, change
def tried(folder, process):
    time.sleep(0.5)
    return attempt.Attempt("it", 2, ["one"], (1.0, 2.0))
change.folders = lambda: [Path("row-overflow"), Path("small-tree")]
change.attempt = tried
raise SystemExit(change.main())
"""
ANSWERS = """
import tempfile
import time
from pathlib import Path
from eagletwin.harness.commands.acceptance.against import Prompting, collect_answers
from eagletwin.harness.deserved.server import Answer
from eagletwin.harness.deserved.checkpoint import Prompt
class Server:
    def flush(self):
        pass
    def ask(self, prompt, new_tokens, temperature, *, whole):
        return Answer(prompt=prompt, tokens=(1,), rounds=0, starts=None, accepted=None, cached=0, finish="length")
class Started:
    rejection_sampling = False
asked = Prompting(Server(), Started(), new_tokens=1, at_once=2, temperature=0.0)
for sent in collect_answers(asked, [Prompt((3,)), Prompt((4,))] * 2, Path(tempfile.mkdtemp())):
    time.sleep(0.5 * ((sent.number, sent.way) in ((0, "alone"), (3, "together"))))
    print(sent.number, sent.way)
"""


def on_a_terminal(program: str, *, both: bool = False, **env: str) -> tuple[str, str]:
    """What a program writes to a terminal, and to stdout, which is a pipe; `both`: stdout is that terminal."""
    master, slave = pty.openpty()
    read, write = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "TERM")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100", **env}
    imported.shared.start(["-c", program], ROOT, environment, slave if both else write, slave)
    os.close(slave)
    os.close(write)
    said = b""
    while select.select([master], [], [], 60)[0]:
        try:
            said += os.read(master, 65536)
        except OSError:  # the terminal was closed on the other side
            break
    with os.fdopen(read) as stdout:
        out = stdout.read()
    code = imported.shared.ended()
    os.close(master)
    assert code == 0, said
    return said.decode(), out


def test_a_terminal_is_shown_what_is_being_looked_at_and_left_clean() -> None:
    said, out = on_a_terminal(PROGRAM)
    assert out == f"{LONG}\n" * 3
    assert "things" in said
    assert "of 3" in said
    assert "one[/]" in said  # names are no markup
    assert [f"worked on {one}" in said for one in ("one[/]", "two", "three")] == [True] * 3
    assert said.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))  # the line is gone, and the cursor there again


def test_what_is_printed_above_the_line_stays_unbroken() -> None:
    said, _ = on_a_terminal(PROGRAM, both=True)
    assert said.count(LONG.rstrip()) == 3


def test_no_color_takes_the_colours_away() -> None:
    colour = re.compile(r"\x1b\[[0-9;]*[3-9][0-9]?;?[0-9;]*m")
    assert colour.search(on_a_terminal(PROGRAM)[0])
    assert not colour.search(on_a_terminal(PROGRAM, NO_COLOR="1")[0])


@pytest.mark.parametrize("env", [{"CI": "true"}, {"TERM": "dumb"}], ids=["ci", "dumb"])
def test_a_terminal_that_nobody_looks_at_is_sent_lines_alone(env: dict[str, str]) -> None:
    said, _ = on_a_terminal(PROGRAM, **env)
    assert said.splitlines() == ["worked on one[/]", "worked on two", "worked on three"]


def test_a_pipe_is_sent_no_control_character() -> None:
    done = imported.run(["-c", PROGRAM], ROOT, os.environ)
    assert done.returncode == 0
    assert done.stderr == "worked on one[/]\nworked on two\nworked on three\n"


@pytest.mark.parametrize(
    ("program", "lines", "shown"),
    [
        pytest.param(FINDINGS, 2, ["of 2 findings", "row-overflow", "small-tree"], id="findings"),
        pytest.param(
            ANSWERS,
            12,
            ["of 12 answers", "prompt 1 of 4, by itself, with an empty", "prompt 4 of 4, with others"],
            id="answers",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_terminal_is_shown_the_progress_of_a_command_and_a_pipe_its_lines(program: str, lines: int, shown: list[str]) -> None:
    said, out = on_a_terminal(program)
    assert len(out.splitlines()) == lines
    assert [text for text in shown if text not in said] == []
    piped = imported.run(["-c", program], ROOT, os.environ)
    assert piped.returncode == 0
    assert piped.stdout == out
    assert piped.stderr == "10 of 12 answers\n" * (lines == 12)


# The remedy for a name that is not known.


MANY = [f"name-{letter}" for letter in "abcdefghijklmnop"] + ["states"]


@pytest.mark.parametrize(
    ("name", "known", "listed", "remedy"),
    [
        ("stat", MANY, "", "did you mean states?"),
        ("stat", MANY, "`list`", "did you mean states? `list` lists all"),
        ("zzz", MANY, "`list`", "`list` lists them"),
        ("zzz", MANY, "", f"use one of {', '.join(MANY)}"),
        (5, [1, 2, 4], "`list`", "use one of 1, 2, 4"),
    ],
)
def test_the_nearest_names_come_first_and_all_are_within_reach(
    name: object, known: list[object], listed: str, remedy: str
) -> None:
    assert nearest(name, known, listed) == remedy
