"""A kernel that the fast runtime does not know runs in Triton's interpreter, where no rule kernel.* is checked: every report
says so, and where these rules were asked for the verdict is unknown."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.argument import argue
from eagletwin.harness.cli.main import typed
from eagletwin.harness.commands.prove.proof import prove
from eagletwin.harness.core.case import Case, pretty_case
from eagletwin.harness.core.errors import EXIT_UNKNOWN
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Kernels
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import long
from . import forked

pytest_plugins = ["pytester"]

# As if attention were written in a way that the fast runtime does not execute.
UNKNOWN_KERNEL = Patch(
    name="unknown-kernel",
    edits=(
        Edit(
            target="eagletwin.harness.engines.triton_cpu.compiler.compiled",
            match="entry = _cache.get(fn)",
            replacement=(
                "entry = _cache.get(fn)\n"
                "if fn.__name__ == '_fwd_kernel':\n"
                "    from eagletwin.harness.engines.triton_cpu.state import Unsupported\n"
                "    raise Unsupported('a construct of tomorrow')"
            ),
        ),
    ),
)
LINE = "Not checked by kernel.*, since Triton's interpreter ran it: _fwd_kernel: a construct of tomorrow."


@pytest.fixture(scope="module")
def small(busy_case: Case) -> Case:
    requests = (msgspec.structs.replace(busy_case.requests[1], arrive=0, max_new_tokens=2),)
    return msgspec.structs.replace(busy_case, name="small", requests=requests)


def ran(host: Host, case: Case, folder: Path, kernels: Kernels) -> Trace:
    trace = host.engine(case, (UNKNOWN_KERNEL,), kernels).run(case, folder)
    assert trace.header.fallbacks == ("_fwd_kernel: a construct of tomorrow",), trace.header.ending
    return trace


def test_the_report_of_an_equal_case_names_the_kernel(host: Host, small: Case, tmp_path: Path) -> None:
    trace = ran(host, small, tmp_path, "fast")
    verdict = judge(trace)
    assert verdict.status == "equal"
    assert LINE in re.sub(r"\s+", " ", argue(trace.header, verdict, trace=trace))


@pytest.mark.parametrize("kernels", ["checked", *long("shadow")])
def test_where_the_rules_of_kernels_were_asked_for_it_is_unknown(
    host: Host, small: Case, tmp_path: Path, kernels: Kernels
) -> None:
    trace = ran(host, small, tmp_path, kernels)
    verdict = judge(trace)
    assert (verdict.status, verdict.vacuous) == ("unknown", False)
    assert "_fwd_kernel" in verdict.reason
    off = frozenset({"kernel.memory", "kernel.undefined", "kernel.order", "kernel.shadow"})
    assert judge(trace, off).status == "equal"


def test_judging_the_trace_again_says_it_as_well(
    host: Host, small: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(host, small, tmp_path, "checked")
    assert typed(["judge", str(tmp_path)]) == EXIT_UNKNOWN
    assert LINE in re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.long
def test_a_proof_of_a_rule_of_kernels_does_not_hold_where_a_kernel_was_not_checked(host: Host, tmp_path: Path) -> None:
    entry: Entry = LEDGER["indices-overflow"]
    assert entry.remedy is not None
    remedy = Patch(name=entry.remedy.name, edits=(*entry.remedy.edits, *UNKNOWN_KERNEL.edits))
    (proof,) = prove(host, [replace(entry, remedy=remedy)], tmp_path)
    assert proof.green.verdict.status == "equal"
    assert not proof.holds
    assert proof.exit_code == EXIT_UNKNOWN


def test_a_test_suite_that_passes_ends_with_the_line(
    pytester: pytest.Pytester, small: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where workers of pytest-xdist run it, test_plugin.py sees it."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (pytester.path / "case.json").write_text(pretty_case(small))
    (pytester.path / "patch.json").write_bytes(msgspec.json.encode(UNKNOWN_KERNEL))
    pytester.makepyfile(
        """
        from pathlib import Path

        import pytest

        from eagletwin.harness.families.valid import read_case


        @pytest.mark.eagletwin(patches=["patch.json"])
        def test_a_case(eagletwin):
            eagletwin.check(read_case(Path(__file__).with_name("case.json")))
        """
    )
    result = forked.session(pytester.path, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*eagletwin: not checked by kernel.*Triton's interpreter ran it: _fwd_kernel*"])
