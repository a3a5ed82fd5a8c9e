"""The laboratory's command line, and what the product says of commands that became part of it."""

import pytest
import typer
from typer.testing import CliRunner

from eagletwin.harness.cli.main import MOVED, typed
from eagletwin.harness.core.errors import InputError

from .__main__ import app, run


def commands() -> set[str]:
    return set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert all(name in shown.output for name in commands())


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("more", [[], ["--help"], ["rate", "--json"]])
def test_the_old_name_of_a_command_says_the_new_one(name: str, more: list[str]) -> None:
    with pytest.raises(InputError) as error:
        typed([*name.split(), *more])
    assert error.value.exit_code == 128
    assert f"python -m tests.lab {MOVED[name]}, in a checkout" in error.value.remedy
    assert MOVED[name].split()[0] in {*commands(), "--help"}


def test_words_that_no_command_takes_are_a_usage_error() -> None:
    for words in (["frobnicate"], ["rate", "--frobnicate"]):
        with pytest.raises(InputError):
            run(words)
