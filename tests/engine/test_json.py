"""`--json` of commands that run an engine: one JSON value alone on stdout, of the schema of harness/commands/result.py."""

from pathlib import Path
from typing import TypeVar

import msgspec

from eagletwin.harness.commands.result import CheckFacts, ProveFacts, ResultFacts, SaidFacts, SearchFacts
from eagletwin.harness.page.render import NAME

from .warm import eagletwin

R = TypeVar("R", bound=ResultFacts)


def printed(shape: type[R], *words: str, cwd: Path, code: int) -> R:
    done = eagletwin(*words, "--json", cwd=cwd)
    assert done.returncode == code, done
    result = msgspec.json.decode(done.stdout, type=shape)
    assert result.exit_code == code
    return result


def test_a_check_that_diverged(tmp_path: Path) -> None:
    result = printed(CheckFacts, "check", "26329", "--revert", "26329", cwd=tmp_path, code=1)
    assert (result.verdict.status, result.verdict.rule) == ("diverged", "draft.input_ids")
    assert (tmp_path / result.folder / "verdict.json").is_file()
    assert result.again == "eagletwin check 26329 --revert 26329"


def test_a_proof(tmp_path: Path) -> None:
    result = printed(ProveFacts, "prove", "25015", cwd=tmp_path, code=0)
    [proof] = result.proofs
    assert (proof.holds, proof.green, proof.red) == (True, "equal", "diverged draft.positions")
    page = (tmp_path / result.folder / NAME).read_text(encoding="utf-8")
    for side in ("green", "red"):
        assert f'href="../25015-{side}/{NAME}"' in page


def test_a_search(tmp_path: Path) -> None:
    result = printed(SearchFacts, "fuzz", "--cases", "1", "--only", "llama-tiny", "--not", "sampling", cwd=tmp_path, code=0)
    assert (result.summary["tally"]["cases"], result.interrupted) == (1, False)


def test_an_sglang_that_cannot_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "tree" / "sglang" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("def (:\n")
    result = printed(SaidFacts, "check", "25015", "--sglang", "tree", cwd=tmp_path, code=125)
    assert result.said.startswith("UNKNOWN  pr-25015\n\n  SGLang cannot be imported: SyntaxError")
