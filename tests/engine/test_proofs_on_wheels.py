"""Fixes proven on published wheels, unchanged: red on the last release before the fix, green on the first with it."""

import os
from pathlib import Path

import pytest

from eagletwin.cases.ledger import LEDGER, PROBES
from eagletwin.harness.commands.prove.proof import prove_on_wheels


def test_fixes_are_proven_on_the_releases_around_them(tmp_path: Path) -> None:
    """Of each way to prove one: a case, a worker built by hand, a probe. Two releases, started once; the command
    `prove --releases all` needs ten."""
    known = [LEDGER["26329"], LEDGER["26997-bonus"], PROBES["26239"]]
    proofs = list(prove_on_wheels(known, tmp_path))
    assert len(proofs) == len(known)
    for proof in proofs:
        if "could not be fetched" in proof.why:
            pytest.skip(proof.why)
        assert proof.holds, (proof.entry.id, proof.why, proof.red, proof.green)
        assert f"on SGLang {proof.entry.last_bad} (cpu" in proof.red.report()
        assert f"on SGLang {proof.entry.fixed} (cpu" in proof.green.report()


def test_without_the_wheels_nothing_is_proven_and_the_reason_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    [proof] = prove_on_wheels([LEDGER["25015"]], tmp_path)
    assert not proof.holds
    assert proof.exit_code == 125
    assert "0.5.11: 0.5.11 could not be fetched" in proof.why
    assert "0.5.12: 0.5.12 could not be fetched" in proof.why
