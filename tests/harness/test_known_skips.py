"""A run with `--known-skips FILE` fails by a skip that the file does not name, and by a line that names none."""

from pathlib import Path

import pytest

from ..rows import spread

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"
SUITE = """
import pytest

@pytest.mark.parametrize("size", [1, 2])
def test_needs_a_gpu(size):
    pytest.skip("no CUDA device here")

def test_runs():
    pass
"""
MODULE = "import pytest\npytest.importorskip('no_such_module')\n"
GPU = "test_suite.py::test_needs_a_gpu*  no CUDA*\n"


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(test_suite=SUITE)
    return pytester


def run(suite: pytest.Pytester, known: str, *arguments: str) -> pytest.RunResult:
    (suite.path / "skips.txt").write_text(f"# why\n\n{known}")
    return pytest_in(suite, "--known-skips", "skips.txt", *arguments)


def pytest_in(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:eagletwin", "-p", "no:hypothesispytest", *arguments)


def test_skips_that_the_file_names_pass(suite: pytest.Pytester) -> None:
    result = run(suite, GPU)
    result.assert_outcomes(passed=1, skipped=2)
    assert result.ret == 0


@pytest.mark.parametrize(
    "known",
    spread(
        [
            "",
            "test_suite.py::test_needs_a_gpu[1]  no CUDA*\n",
            "test_suite.py::test_needs_a_gpu*  SGLang*\n",
            "test_suite.py::*\n",
        ]
    ),
    ids=["no line", "another size", "another reason", "no reason"],
)
def test_a_skip_that_the_file_does_not_name_fails_the_run(suite: pytest.Pytester, known: str) -> None:
    result = run(suite, known)
    assert result.ret == 1
    unknown = "skipped, and skips.txt does not name it: test_suite.py::test_needs_a_gpu[2]  no CUDA device here"
    assert unknown in result.outlines


@pytest.mark.slow
def test_what_workers_skip_fails_the_run_a_whole_file_too(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_module=MODULE)
    result = run(suite, "", "-n", "2")
    assert result.ret == 1
    assert "skipped, and skips.txt does not name it: test_suite.py::test_needs_a_gpu[2]  no CUDA device here" in result.outlines
    assert "skipped, and skips.txt does not name it: test_module.py  could not import 'no_such_module'" in result.stdout.str()


@pytest.mark.slow
def test_a_line_that_names_no_skipped_test_fails_the_run(suite: pytest.Pytester) -> None:
    result = run(suite, f"{GPU}test_suite.py::test_runs  no CUDA*\n")
    assert result.ret == 1
    assert "skips.txt names it, and no such test was skipped: test_suite.py::test_runs  no CUDA*" in result.outlines


@pytest.mark.slow
def test_an_expected_failure_is_a_skip(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite="import pytest\n\n@pytest.mark.xfail(reason='later')\ndef test_one():\n    assert 0\n")
    result = run(suite, "")
    assert result.ret == 1
    assert "skipped, and skips.txt does not name it: test_suite.py::test_one  later" in result.outlines


def test_a_quick_run_leaves_slow_tests_out_and_cannot_import_sglang(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_suite="import pytest\n\n@pytest.mark.slow\ndef test_slow():\n    pass\n\n"
        "def test_sglang():\n    with pytest.raises(ImportError):\n        import sglang\n"
    )
    suite.makeini("[pytest]\nmarkers = slow\n")
    result = pytest_in(suite, "--quick")
    result.assert_outcomes(passed=1, deselected=1)
