"""`eagletwin info ledger`, `rules` and `models` list what there is, as text and as JSON."""

import json

import pytest
from packaging.version import Version

from eagletwin.cases.ledger import LEDGER, PROBES
from eagletwin.harness.cli.main import typed
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.families import FAMILIES, RECIPES
from eagletwin.harness.judge.rules import catalogue


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert typed(words) == 0
    return capsys.readouterr().out


def test_the_ledger_lists_every_entry_and_probe(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "info", "ledger").splitlines()
    assert [line.split()[0] for line in lines[: len(LEDGER) + len(PROBES)]] == [*LEDGER, *PROBES]
    facts = json.loads(printed(capsys, "info", "ledger", "--json"))
    assert len({tuple(sorted(fact)) for fact in facts}) == 1  # a program reads all of them alike
    assert [fact["id"] for fact in facts] == [*LEDGER, *PROBES]
    assert {fact["told_apart_by"] for fact in facts} == {"revert", "remedy", "view", "call"}


def test_the_ledger_of_live_bugs_has_no_fixed_one(capsys: pytest.CaptureFixture[str]) -> None:
    ids = [fact["id"] for fact in json.loads(printed(capsys, "info", "ledger", "--live", "--json"))]
    assert ids == [entry.id for entry in (*LEDGER.values(), *PROBES.values()) if not entry.fixed]


@pytest.mark.parametrize(
    ("release", "name", "there"),
    [
        ("0.5.11", "25015", True),
        ("0.5.12", "25015", False),
        ("0.5.23", "small-tree", True),
        ("0.5.9", "small-tree", False),
        ("0.5.9", "10846", False),
        ("0.5.8", "10846", True),
        ("0.5.11.dev3+g1a2b3c", "25015", True),
        ("1a2b3c", "25015", False),
    ],
)
def test_a_release_has_the_bugs_between_their_first_and_their_last(release: str, name: str, there: bool) -> None:
    assert LEDGER[name].is_in(release) is there


def test_a_release_that_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match="is not a known release"):
        typed(["info", "ledger", "--in", "0.4.1"])


def test_the_bugs_of_one_release_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(releases()) == sorted(releases(), key=Version)
    ids = [fact["id"] for fact in json.loads(printed(capsys, "info", "ledger", "--in", "0.5.11", "--json"))]
    assert [name for name in ids if name in LEDGER] == [name for name, entry in LEDGER.items() if entry.is_in("0.5.11")]


def test_one_entry_is_listed_with_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "info", "ledger", "25015")
    assert "eagletwin check 25015 --revert 25015" in text
    assert "eagletwin prove 25015" in text
    assert "eagletwin prove --releases 26239" in printed(capsys, "info", "ledger", "26239")
    assert "python -m tests.lab releases --entry dsv4-draft-reads" in printed(capsys, "info", "ledger", "dsv4-draft-reads")


def test_the_rules_are_listed_as_text_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "info", "rules")
    assert all(f"{name}  (design" in text for name in catalogue())
    assert [rule["name"] for rule in json.loads(printed(capsys, "info", "rules", "--json"))] == list(catalogue())


def test_the_models_are_listed_with_their_families_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "info", "models")
    assert all(f"  {name} " in text for name in RECIPES)
    assert all(limit in text for family in FAMILIES.values() for limit in family.limits)
    assert "A case names a recipe as its `model`, and no other checkpoint." in text
    families = json.loads(printed(capsys, "info", "models", "--json"))
    assert [recipe["name"] for family in families for recipe in family["recipes"]] == list(RECIPES)
