"""The ledger is the files of its folder, and documents have of it what the command writes."""

from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

import pytest

from eagletwin.cases import ledger
from eagletwin.cases.ledger import LEDGER, PROBES, by_id
from tests import ledger as derived


def test_a_file_is_named_after_its_bug_or_after_what_the_names_of_its_bugs_begin_with() -> None:
    found = []
    for file in iter_modules(ledger.__path__):
        module = import_module(f"{ledger.__name__}.{file.name}")
        name = file.name.removeprefix("pr_").replace("_", "-")
        ids = [bug.id for bug in getattr(module, "ENTRIES", None) or (module.ENTRY,)]
        assert ids == [name] or (len(ids) > 1 and all(one == name or one.startswith(f"{name}-") for one in ids)), file.name
        found += ids
    assert sorted(found) == sorted([*LEDGER, *PROBES])


def test_an_id_that_two_files_have_is_refused() -> None:
    bug = LEDGER["small-tree"]
    assert by_id([bug]) == {"small-tree": bug}
    with pytest.raises(ValueError, match="two entries of the ledger have the id small-tree"):
        by_id([bug, LEDGER["25015"], replace(bug)])


def test_files_that_the_order_does_not_name_come_last_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_ORDER", ["small_tree", "pr_25015"])
    found = [bug.id for bug in ledger._known(["min_p", "pr_25015", "certain_node", "small_tree"])]
    assert found == ["small-tree", "25015", "certain-node", "min-p"]


def test_documents_say_what_the_ledger_says() -> None:
    assert not derived.stale(derived.documents()), f"run: {derived.COMMAND}"


def test_a_new_bug_makes_the_documents_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    bug = replace(LEDGER["25015"], id="1", title="A new one", trigger="topk > 1, and a Tuesday", buggy="0.5.23 -")
    bug = replace(bug, fixed="", last_bad="", hidden="", remedy=bug.revert, revert=None)
    monkeypatch.setattr(derived, "KNOWN", (*derived.KNOWN, bug))
    assert derived.stale(derived.documents()) == ["docs/guide/acceptance-fell.md", "docs/index.md"]
    trees = derived.by_flags().partition("### Trees")[2].partition("###")[0]
    assert "| `1` | 0.5.23 and later (live) | topk > 1, and a Tuesday | `draft.positions` |  |" in trees
    assert "`1` (A new one)" in derived.ready()


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
