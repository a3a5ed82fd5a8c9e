"""The ledger is the files of its folder: each names its bug."""

from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

import pytest

from eagletwin.cases import ledger
from eagletwin.cases.ledger import LEDGER, PROBES, by_id


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
