"""Progress on a terminal, and nothing of it anywhere else: in a pipe, in CI, on a dumb terminal."""

import os
import pty
import re
import select
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from eagletwin.harness.core.progress import each
for thing in each(["one[/]", "two", "three"], "things", str):
    print(f"worked on {thing}", file=sys.stderr)
    print("long " * 60)
"""
LONG = "long " * 60


def on_a_terminal(*command: str, both: bool = False, **env: str) -> tuple[str, str]:
    """What a command writes to a terminal, and to stdout, which is a pipe; `both`: stdout is that terminal."""
    master, slave = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "TERM")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100", **env}
    with subprocess.Popen(command, stdout=slave if both else subprocess.PIPE, stderr=slave, env=environment) as child:
        os.close(slave)
        said = b""
        while select.select([master], [], [], 60)[0]:
            try:
                said += os.read(master, 65536)
            except OSError:  # the terminal was closed on the other side
                break
        out = "" if child.stdout is None else child.stdout.read().decode()
    os.close(master)
    assert child.returncode == 0, said
    return said.decode(), out


def test_a_terminal_is_shown_what_is_being_looked_at_and_left_clean() -> None:
    said, out = on_a_terminal(sys.executable, "-c", PROGRAM)
    assert out == f"{LONG}\n" * 3
    assert "things" in said
    assert "of 3" in said
    assert "one[/]" in said  # names are no markup
    assert [f"worked on {one}" in said for one in ("one[/]", "two", "three")] == [True] * 3
    assert said.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))  # the line is gone, and the cursor there again


def test_what_is_printed_above_the_line_stays_unbroken() -> None:
    said, _ = on_a_terminal(sys.executable, "-c", PROGRAM, both=True)
    assert said.count(LONG.rstrip()) == 3


def test_no_color_takes_the_colours_away() -> None:
    colour = re.compile(r"\x1b\[[0-9;]*[3-9][0-9]?;?[0-9;]*m")
    assert colour.search(on_a_terminal(sys.executable, "-c", PROGRAM)[0])
    assert not colour.search(on_a_terminal(sys.executable, "-c", PROGRAM, NO_COLOR="1")[0])


@pytest.mark.parametrize("env", [{"CI": "true"}, {"TERM": "dumb"}], ids=["ci", "dumb"])
def test_a_terminal_that_nobody_looks_at_is_sent_lines_alone(env: dict[str, str]) -> None:
    said, _ = on_a_terminal(sys.executable, "-c", PROGRAM, **env)
    assert said.splitlines() == ["worked on one[/]", "worked on two", "worked on three"]


def test_a_pipe_is_sent_no_control_character() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stderr == "worked on one[/]\nworked on two\nworked on three\n"
