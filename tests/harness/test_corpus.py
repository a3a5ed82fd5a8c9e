"""Cases that ran a change come first in the next search of it, and are judged as any."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.commands.fuzz.corpus import Corpus
from eagletwin.harness.commands.fuzz.looking import NO_BLOCK, BlockRunner, CaseSeen, Unstarted
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.tally import LEAST
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Differs, with_executed
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.difference import File, difference
from eagletwin.harness.engines.host import WouldNotStart
from eagletwin.harness.engines.source import Source

FILE = "sglang/srt/speculative/thing.py"
OLD = "def double(x):\n    return x + x\n\n\ndef half(x):\n    if x:\n        x = x / 2\n    return x\n"
DOUBLE = OLD.replace("x + x", "2 * x")
BOTH = DOUBLE.replace("        x = x / 2\n    return x", "        x = 0.5 * x\n    return 1 * x")
EQUAL = Verdict(status="equal")
CASES = [
    replace(LEDGER["25015"].case, name=f"case-{number}", num_steps=number % 8 + 1, topk=number // 8 + 1, exercises=())
    for number in range(2 * LEAST)
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path / "cache"))


def source(new: str, base: str = "0.5.23") -> Source:
    return Source("tree", (Path("tree"),), "tree", difference(base, [File(FILE, OLD.encode(), new.encode())]))


def ran(of: Source, *lines: int) -> Differs:
    assert of.difference is not None
    differs = of.difference.watch.differs
    return with_executed(differs, [place for place in differs.places if int(place.rpartition(":")[2]) in lines])


def leave(of: Source, *cases: tuple[Case, tuple[int, ...]]) -> None:
    corpus = Corpus(of)
    for case, lines in cases:
        corpus.add(case, ran(of, *lines))
    corpus.write()


def test_the_next_search_of_a_change_begins_with_the_cases_that_ran_it() -> None:
    leave(source(DOUBLE), (CASES[0], ()), *((case, (2,)) for case in CASES[1:]))
    assert Corpus(source(DOUBLE)).cases() == tuple(CASES[1 : LEAST + 1])
    assert Corpus(source(DOUBLE)).cases(lambda case: case.topk == 1) == tuple(CASES[1:8])
    assert Corpus(Source()).cases() == ()
    assert Corpus(source(OLD)).cases() == ()
    assert Corpus(source(DOUBLE, "0.5.20")).cases() == ()


def test_each_changed_statement_has_the_case_that_ran_it_first() -> None:
    leave(source(BOTH), *((case, (8,)) for case in CASES[:-1]), (CASES[-1], (7, 8)))
    assert Corpus(source(BOTH)).cases() == (CASES[0], CASES[-1], *CASES[1 : LEAST - 1])


def test_small_cases_come_first_then_those_of_their_engines_and_before_them_what_was_found() -> None:
    small = replace(CASES[0], requests=(replace(CASES[0].requests[0], max_new_tokens=1),))
    corpus = Corpus(source(DOUBLE))
    for case in (CASES[1], CASES[0], small):
        corpus.add(case, ran(source(DOUBLE), 2))
    corpus.add(CASES[2], ran(source(DOUBLE), 2), found=True)
    assert corpus.recent == (CASES[2], small, CASES[0], CASES[1])


def test_cases_of_several_functions_come_by_turns_and_once() -> None:
    leave(source(BOTH), (CASES[0], (2,)), (CASES[1], (2,)), (CASES[2], (8,)), (CASES[0], (8,)))
    assert Corpus(source(BOTH)).cases() == (CASES[0], CASES[2], CASES[1])


def test_another_edit_of_a_function_has_the_cases_of_the_newest_and_each_content_its_own() -> None:
    other = OLD.replace("x + x", "x * 2")
    leave(source(DOUBLE), (CASES[0], (2,)))
    assert Corpus(source(other)).cases() == (CASES[0],)
    leave(source(other), (CASES[1], (2,)))
    assert Corpus(source(DOUBLE)).cases() == (CASES[0],)
    assert Corpus(source(other)).cases() == (CASES[1],)


def test_the_cache_has_few_contents_of_one_function() -> None:
    for number in range(20):
        leave(source(OLD.replace("x + x", f"x * {number}")), (CASES[0], (2,)))
    assert len(list(cache_folder("corpus").iterdir())) == 8


@pytest.mark.parametrize("content", [b"[{", b'[{"name": "a"}]', b"7"])
def test_a_file_that_cannot_be_read_counts_as_none(content: bytes) -> None:
    leave(source(DOUBLE), (CASES[0], (2,)))
    (file,) = cache_folder("corpus").iterdir()
    file.write_bytes(content)
    assert Corpus(source(DOUBLE)).cases() == ()


def test_a_case_of_a_recipe_that_is_gone_counts_as_none() -> None:
    leave(source(DOUBLE), (CASES[0], (2,)))
    (file,) = cache_folder("corpus").iterdir()
    file.write_bytes(msgspec.json.encode([replace(CASES[0], model="gone")]))
    assert Corpus(source(DOUBLE)).cases() == ()


def test_a_search_runs_them_before_its_first_block_and_not_what_ran_already(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = WouldNotStart("no", consequence="", remedy="", ours=False)

    def case(_: Any, number: int, case: Case, *_more: object) -> CaseSeen:
        if case == CASES[1]:
            raise refused
        return CaseSeen(block=number, case=case, verdict=EQUAL)

    monkeypatch.setattr(BlockRunner, "_case", case)
    monkeypatch.setattr(BlockRunner, "run", lambda self, block, earlier: iter(earlier))
    matcher: Any = SimpleNamespace(views=lambda case: ("declared",), present=lambda case, view: ())
    runner = BlockRunner(matcher, SearchOptions(first=tuple(CASES[:3])).plan)
    before, own = (CaseSeen(block=of, case=case, verdict=EQUAL) for of, case in ((NO_BLOCK, CASES[2]), (0, CASES[3])))
    seen = list(runner.block(0, (before, own)))
    assert seen == [CaseSeen(block=NO_BLOCK, case=CASES[0], verdict=EQUAL), Unstarted(CASES[1], "no", ours=False), own]
    assert list(runner.block(1)) == []
