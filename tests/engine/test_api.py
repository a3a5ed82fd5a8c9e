"""`from eagletwin import Case, cases, check, judge`."""

import subprocess
import sys

import pytest

import eagletwin
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.strategies import cases
from eagletwin.harness.check import api
from eagletwin.harness.core.case import Case
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge


def test_the_public_names_are_these() -> None:
    assert eagletwin.__all__ == ["Case", "cases", "check", "judge"]
    assert (eagletwin.Case, eagletwin.check, eagletwin.judge) == (Case, api.check, judge)
    assert repr(eagletwin.cases(max_requests=1)) == repr(cases(max_requests=1))
    with pytest.raises(AttributeError, match="'nothing'"):
        eagletwin.nothing  # noqa: B018


def test_importing_eagletwin_imports_no_torch() -> None:
    code = "import eagletwin, sys; assert 'torch' not in sys.modules and 'hypothesis' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_check_is_equal_with_a_fix_and_diverged_without_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_host", lambda sglang, mode: host)
    entry = LEDGER["25015"]
    assert eagletwin.check(entry.case).status == "equal"
    assert eagletwin.check(entry.case, patches=entry.red.patches).rule == "draft.positions"
