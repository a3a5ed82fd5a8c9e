"""The claim that `prove` shows first: the same tokens with a fix and without it, and fewer accepted drafts."""

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.commands.prove.proof import show_claim
from eagletwin.harness.core.run_spec import DEFAULT_RUN
from eagletwin.harness.engines.host import Host


def test_tokens_are_the_same_and_accepted_drafts_are_not(host: Host) -> None:
    text = show_claim(host, LEDGER["26329"], DEFAULT_RUN)
    assert len(text.splitlines()) <= 12
    tokens = [line for line in text.splitlines() if line.startswith("  tokens ")]
    drafts = [line for line in text.splitlines() if line.startswith("  accepted drafts ")]
    assert tokens[0] == tokens[1]
    assert drafts[0].endswith(" = 26 in 14 rounds")
    assert drafts[1].endswith(" = 23 in 17 rounds")


def test_an_entry_without_such_a_case_shows_nothing(host: Host) -> None:
    assert show_claim(host, LEDGER["25015"], DEFAULT_RUN) == ""
