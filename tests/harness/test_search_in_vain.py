"""A search none of whose engines starts: a release that has nothing of what is asked."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.commands.fuzz.looking import CaseSeen, Unstarted
from eagletwin.harness.commands.fuzz.options import Plan
from eagletwin.harness.commands.fuzz.report import document_of, write_summary
from eagletwin.harness.commands.fuzz.search import Fuzz
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.page.render import text_of


class Refusing:
    """Blocks of which none runs a case, for ever."""

    replays = False

    def __init__(self) -> None:
        self.asked = 0

    def blocks(self) -> Iterator[Iterator[CaseSeen | Unstarted]]:
        while True:
            self.asked += 1
            yield iter([Unstarted(LEDGER["25015"].case, "this release has none of it", ours=True)])


def test_it_ends_long_before_its_time_and_names_the_reason(tmp_path: Path) -> None:
    host = SimpleNamespace(source=SimpleNamespace(tree="", base=None, called="0.5.23"))
    trials: Any = SimpleNamespace(host=host, run=RunSpec())
    pool: Any = Refusing()
    plan = Plan(seed=0, seconds=1e9, max_cases=1000, shrink_seconds=1.0, command="")
    fuzz = Fuzz(trials, tmp_path, plan, pool=pool)
    assert list(fuzz.search()) == []
    assert pool.asked == 100
    assert list(fuzz.tally.refused) == [f"{LEDGER['25015'].case.model}: this release has none of it"]
    text = text_of(document_of(write_summary(tmp_path, fuzz, []), tmp_path), 100)
    assert "NOTHING LOOKED AT" in text
    assert "this release has none of it" in text
