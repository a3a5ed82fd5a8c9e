"""`--json`: each command has it, prints one JSON value alone on stdout whatever it ends with, and keeps to its schema."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eagletwin.harness.cli.main import command_tree, main
from eagletwin.harness.commands.result import (
    NO_RESULT,
    OLDER,
    SHAPES,
    FailedFacts,
    SaidFacts,
    WrittenFacts,
    emit_result,
    with_json,
)
from eagletwin.harness.core.errors import AlreadyReported
from eagletwin.harness.core.trace import write_trace

from ..page.planted import recorded
from . import cli_page, json_page


def commands() -> dict[str, Any]:
    root = command_tree()
    context = root.make_context("eagletwin", ["info"], resilient_parsing=True)
    return {path.removeprefix("eagletwin "): command for path, command in cli_page._commands(root, context, "eagletwin")}


def entered(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr("sys.argv", ["eagletwin", *map(str, words)])
    return main()


def test_every_command_with_a_result_has_json_and_a_place_in_the_schema() -> None:
    have = {name for name, command in commands().items() if any("--json" in option.opts for option in command.params)}
    assert have == {" ".join(word for word in name.split() if word.isalpha() and word.islower()) for name in (*SHAPES, *OLDER)}
    assert commands().keys() - have == set(NO_RESULT)


def test_the_page_is_made_of_the_classes() -> None:
    assert json_page.PAGE.read_text(encoding="utf-8") == json_page.page(), "run: python -m tests.harness.json_page"


def test_a_schema_says_what_each_field_is_of() -> None:
    schema = msgspec.json.schema(SHAPES["prove"])["$defs"]["ProveFacts"]
    assert {"schema", "exit_code", "proofs", "not_reached"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False


WRONG = {
    "a case that is not there": ("check", "nothing"),
    "an option that is not there": ("fuzz", "--bogus"),
    "two options that exclude each other": ("compare", "a", "b", "--markdown"),
    "an option that is given twice": ("prove", "all", "--out", "a", "--out", "b"),
    "an entry that is not there": ("info", "ledger", "nothing"),
    "no page": ("judge", "--html", "."),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_usage_error_is_an_object(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert entered(monkeypatch, *WRONG[what], "--json") == 128
    out, err = capsys.readouterr()
    failed = msgspec.json.decode(out, type=FailedFacts)
    assert failed.exit_code == 128
    assert err.startswith(f"error: {failed.error.cause}\n  so:  ")


def traces(folder: Path) -> tuple[Path, Path]:
    for name, rounds in (("a", 2), ("b", 3)):
        (folder / name).mkdir()
        trace = recorded(rounds)
        write_trace(folder / name, trace.header, trace.tensors)
    return folder / "a", folder / "b"


def test_what_commands_print_keeps_to_the_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of commands that need no engine; the others are in tests/engine/test_commands.py."""
    a, b = traces(tmp_path)
    for words, code in (
        (("judge", a), 125),
        (("compare", a, a), 0),
        (("compare", a, b), 1),
        (("judge", "--html", a), 0),
        (("info", "releases", "list"), 0),
    ):
        assert entered(monkeypatch, *words, "--json") == code, words
        name = " ".join(map(str, words[: {"info": 3}.get(str(words[0]), 1)]))
        name = "judge --html" if "--html" in words else name
        shape = SHAPES["compare RUN RUN" if name == "compare" else name]
        result = msgspec.json.decode(capsys.readouterr().out, type=shape)
        assert (result.schema, result.exit_code) == (1, code)


@pytest.mark.parametrize("words", [("info", "ledger"), ("info", "rules"), ("info", "models")])
def test_lists_are_json_alone(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entered(monkeypatch, *words, "--json") == 0
    assert isinstance(json.loads(capsys.readouterr().out), list)


def test_a_command_that_ends_without_a_result_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    @with_json
    def early() -> int:
        print("UNKNOWN  it would not start")
        return 125

    assert early(as_json=True) == 125
    out, err = capsys.readouterr()
    said = msgspec.json.decode(out, type=SaidFacts)
    assert (said.exit_code, said.said) == (125, "UNKNOWN  it would not start")
    assert err == "UNKNOWN  it would not start\n"
    assert early() == 125
    assert capsys.readouterr().out == "UNKNOWN  it would not start\n"


def test_ctrl_c_before_there_is_a_result_is_an_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typer makes a return of it, so that no exception reaches what prints errors."""

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eagletwin.harness.judge.rules.rules_json", ended)
    assert entered(monkeypatch, "info", "rules", "--json") == 130
    out, err = capsys.readouterr()
    assert msgspec.json.decode(out, type=FailedFacts).exit_code == 130
    assert err.startswith("interrupted: ")


def test_an_interrupted_command_prints_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    @with_json
    def interrupted() -> int:
        emit_result(WrittenFacts(files={"page": "p"}))
        raise AlreadyReported(130)

    with pytest.raises(AlreadyReported):
        interrupted(as_json=True)
    result = msgspec.json.decode(capsys.readouterr().out, type=WrittenFacts)
    assert (result.exit_code, result.files) == (130, {"page": "p"})
