"""Progress on a terminal, and nothing of it anywhere else: in a pipe, in CI, on a dumb terminal."""

import os
import pty
import re
import select
from pathlib import Path

import pytest

from . import imported

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
from tests.findings import attempt
def tried(folder, process):
    time.sleep(0.5)
    return attempt.Attempt("it", 2, ["one"], (1.0, 2.0))
attempt.folders = lambda: [Path("row-overflow"), Path("small-tree")]
attempt.attempt = tried
raise SystemExit(attempt.main())
"""
ANSWERS = """
import tempfile
import time
from pathlib import Path
from eagletwin.harness.commands.acceptance.answers import Asked, answered
from eagletwin.harness.deserved.server import Answer
from eagletwin.harness.deserved.texts import Prompt
class Server:
    def flush(self):
        pass
    def ask(self, prompt, new_tokens, sampling):
        return Answer(prompt=prompt, tokens=(1,), rounds=0, starts=None, accepted=None, cached=0, finish="length")
class Started:
    rejection_sampling = False
asked = Asked(Server(), Started(), new_tokens=1, at_once=2, temperature=0.0)
for sent in answered(asked, [Prompt((3,)), Prompt((4,))] * 2, Path(tempfile.mkdtemp())):
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
