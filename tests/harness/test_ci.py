"""CI brings the releases that its tests run, and each list that it reads says what is so."""

import ast
from pathlib import Path

from eagletwin.harness.engines.provision import releases

TESTS = Path(__file__).parents[1]


def test_ci_fetches_each_release_that_a_test_of_the_engine_names() -> None:
    fetched = (TESTS / "releases.txt").read_text().split()
    assert fetched == sorted(set(fetched), key=releases().index)
    named = {
        node.value
        for file in (TESTS / "engine").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in releases()
    }
    assert named <= set(fetched)
    assert len(named) >= 8


def test_ci_checks_skips_and_prints_the_longest_tests() -> None:
    script = (TESTS.parent / ".ci" / "run").read_text()
    for part in ("releases fetch < tests/releases.txt", "--durations=25", "-rs", "--known-skips tests/skips.txt"):
        assert part in script
