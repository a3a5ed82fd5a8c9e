"""The ledger is the files of its folder, and `eagletwin info` and documents have of it what there is."""

import json
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

import pytest
from packaging.version import Version

from eagletwin.cases import ledger
from eagletwin.cases.ledger import ENTRIES, LEDGER, PROBES, by_id, entries_in, ledger_of
from eagletwin.cases.reach import why_unreachable
from eagletwin.harness.cli.main import run_command
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.families import FAMILIES, RECIPES
from eagletwin.harness.judge.rules import catalogue
from tests import ledger as derived

# The ledger is the files of its folder, and documents have of it what the command writes.


def test_a_file_is_named_after_its_bug_or_after_what_its_bugs_share_and_names_each() -> None:
    found = []
    for file in iter_modules(ledger.__path__):
        module = import_module(f"{ledger.__name__}.{file.name}")
        name = file.name.removeprefix("pr_").replace("_", "-")
        ids = [bug.id for bug in getattr(module, "ENTRIES", None) or (module.ENTRY,)]
        shared = all(one == name or one.startswith(f"{name}-") for one in ids)
        assert ids == [name] or (len(ids) > 1 and (shared or all(one in module.__doc__ for one in ids))), file.name
        found += ids
    assert sorted(found) == sorted([*ENTRIES, *PROBES])


def test_each_engine_has_a_ledger_of_its_own() -> None:
    """What asks for SGLang's bugs sees no other's, and the reverse; an id names its engine's in both."""
    vllm = entries_in("vllm")
    assert entries_in("sglang") == LEDGER
    assert {**LEDGER, **vllm} == ENTRIES
    assert {entry.engine for entry in ledger_of(["all"], "vllm")} == {"vllm"}
    assert all(name.startswith("vllm-") for name in vllm)
    assert all((entry.case.engine.vllm is not None) == (name in vllm) for name, entry in ENTRIES.items())
    one = vllm["vllm-chunk-tail"]
    assert why_unreachable(one) == "vllm-chunk-tail is a bug of vLLM: it needs --engine vllm"
    assert not why_unreachable(one, Mode(engine="vllm"))
    assert why_unreachable(LEDGER["25015"], Mode(engine="vllm")) == "25015 is a bug of SGLang: it needs --engine sglang"
    assert one.command(one.red) == "eagletwin check vllm-chunk-tail --engine vllm"


def test_an_id_that_two_files_have_is_refused() -> None:
    bug = LEDGER["small-tree"]
    assert by_id([bug]) == {"small-tree": bug}
    with pytest.raises(ValueError, match="two entries of the ledger have the id small-tree"):
        by_id([bug, LEDGER["25015"], replace(bug)])


def test_files_that_the_order_does_not_name_come_last_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_ORDER", ["pr_8409", "pr_25015"])
    found = [bug.id for bug in ledger._load_entries(["prefill_graph", "pr_25015", "hybrid_keys", "pr_8409"])]
    assert found == ["8409", "25015", "hybrid-keys", "prefill-graph"]


def test_documents_say_what_the_ledger_says() -> None:
    assert not derived.stale(derived.documents()), f"run: {derived.COMMAND}"


def test_a_new_bug_makes_the_documents_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    bug = replace(LEDGER["25015"], id="1", title="A new one", trigger="topk > 1, and a Tuesday", buggy="0.5.23 -")
    bug = replace(bug, fixed="", last_bad="", hidden="", remedy=bug.revert, revert=None)
    for name in ("KNOWN", "_ALL"):
        monkeypatch.setattr(derived, name, (*getattr(derived, name), bug))
    assert derived.stale(derived.documents()) == ["docs/guide/acceptance-fell.md", "docs/findings/README.md", "README.md"]
    trees = derived.by_flags().partition("### Trees")[2].partition("###")[0]
    assert "| `1` | since 0.5.23 | topk > 1, and a Tuesday | `draft.positions` |  |" in trees
    assert "`1` (A new one)" in derived.by_harm()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("25015", "draft.positions"),  # by its own rule
        ("26997-bonus", "commit.path"),  # by another one, which the entry names
        ("min-p", "which token a request may be given depends on its logits"),
        ("small-tree", ""),  # the server ends
        ("8409", ""),  # shown in a view alone
    ],
)
def test_what_a_recording_shows_of_a_bug(name: str, found: str) -> None:
    assert derived.recorded(LEDGER[name]) == found


# `eagletwin info ledger`, `rules` and `models` list what there is, as text and as JSON.


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run_command(words) == 0
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
        run_command(["info", "ledger", "--in", "0.4.1"])


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
