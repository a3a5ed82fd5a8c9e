"""Searching a tree again: after each save, and beginning with cases of the search before."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.cli.main import run_command
from eagletwin.harness.commands.fuzz import watching
from eagletwin.harness.commands.fuzz.corpus import Corpus
from eagletwin.harness.commands.fuzz.looking import NO_BLOCK, BlockRunner, CaseSeen, Unstarted
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.tally import LEAST, Tally
from eagletwin.harness.commands.fuzz.watching import Files, WatchedSearch, saying_that_kernels_compile, search_again
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Changes, Differs, with_executed
from eagletwin.harness.core.errors import EXIT_USAGE, AlreadyReported, InputError, run_guarded
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.core.run_spec import DEFAULT_RUN
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.difference import File, difference
from eagletwin.harness.engines.host import WouldNotStart
from eagletwin.harness.engines.source import Source

CASE = LEDGER["25015"].case


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "srt" / "__pycache__").mkdir(parents=True)
    (tmp_path / "srt" / "a.py").write_text("1")
    return tmp_path


def looking(*places: str, cases: int = 3, reached: int = 2, undecided: int = 0) -> Any:
    """A search that ran the first of these statements."""
    differs = Differs(base="0.5.23", functions=("m.f",), statements={"m.f": places}, executed=places[:1]) if places else None
    tally = Tally(cases=cases, reached=reached, undecided=undecided, changes=Changes(differs))
    trials = SimpleNamespace(host=SimpleNamespace(source=SimpleNamespace(called=f"0.5.23+{places}")))
    return SimpleNamespace(tally=tally, trials=trials, corpus=SimpleNamespace(recent=(CASE,) if places else ()))


def ctrl_c(_: WatchedSearch) -> None:
    raise AlreadyReported(130)


def searches(*each: Callable[[WatchedSearch], None]) -> Callable[[WatchedSearch], None]:
    """One after the other; then Ctrl-C."""
    left = [*each, ctrl_c]
    return lambda one: left.pop(0)(one)


def answering(code: int, *places: str, then: Callable[[], object] = lambda: None) -> Callable[[WatchedSearch], None]:
    def search(one: WatchedSearch) -> None:
        one.follow(looking(*places))
        one.answer(code)
        then()

    return search


def test_what_is_saved_made_or_removed_is_seen_and_what_python_writes_is_not(tree: Path) -> None:
    files = Files(tree)
    (tree / "srt" / "__pycache__" / "a.py").write_text("1")
    (tree / "srt" / "notes.md").write_text("1")
    assert files.saved() == []
    (tree / "srt" / "a.py").write_text("12")
    (tree / "b.py").write_text("")
    assert files.saved() == ["a.py", "b.py"]
    files.forget()
    assert files.saved() == []
    (tree / "b.py").unlink()
    assert files.saved() == ["b.py"]


def test_what_the_kernel_does_not_tell_is_seen_all_the_same(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tree)
    monkeypatch.setattr(watching._Events, "any", lambda self: False)
    (tree / "srt" / "a.py").write_text("12")
    assert files.saved() == []
    monkeypatch.setattr(watching, "_ANYWAY", -1.0)
    assert files.saved() == ["a.py"]


def test_files_of_a_folder_that_is_new_are_seen(tree: Path) -> None:
    files = Files(tree)
    (tree / "new").mkdir()
    assert files.saved() == []
    (tree / "new" / "c.py").write_text("")
    assert files.saved() == ["c.py"]
    (tree / "new" / "c.py").unlink()
    assert files.saved() == []


def test_a_save_after_a_search_begins_another_and_ctrl_c_ends_with_the_last_verdict(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def save() -> None:
        (tree / "srt" / "a.py").write_text("two")

    found = answering(1, "f.py:1", "f.py:2", then=save)
    assert search_again(tree, searches(answering(0, then=save), found, ctrl_c)) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("EQUAL  no change: 3 cases; ")
    assert first.endswith(" s after the start")
    assert second.startswith("DIVERGED  f: 2 of 3 cases ran it (1 of 2 statements); ")
    assert second.endswith(" s after a.py was saved")


def test_a_save_while_a_search_runs_ends_it_and_the_next_begins_with_what_ran_the_change(tree: Path) -> None:
    def run_on() -> None:
        (tree / "srt" / "a.py").write_text("two")
        while True:
            time.sleep(0.01)

    rounds = list[WatchedSearch]()
    each = searches(answering(0, "f.py:1", then=run_on), answering(0, then=run_on))

    def search(one: WatchedSearch) -> None:
        rounds.append(one)
        each(one)

    assert search_again(tree, search) == 0
    assert [one.recent for one in rounds] == [(), (CASE,), (CASE,)]
    assert [one.saved for one in rounds] == [[], ["a.py"], ["a.py"]]


def test_ctrl_c_while_nothing_runs_ends_it_too(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:  # a process in the background may ignore the signal
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert search_again(tree, answering(125, "f.py:1")) == 125


def test_what_keeps_a_search_from_running_is_said_and_the_next_save_is_waited_for(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: WatchedSearch) -> None:
        (tree / "srt" / "a.py").write_text("two")
        raise InputError("the tree holds no sglang", consequence="nothing was run", remedy="name another")

    assert search_again(tree, searches(refuse)) == EXIT_USAGE
    assert "error: the tree holds no sglang" in capsys.readouterr().err


def test_a_verdict_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    one = WatchedSearch([], ())
    one.answer(0)
    one.follow(looking("f.py:1"))
    for code in (0, 0, 1):
        one.answer(code)
    assert [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()] == ["EQUAL", "DIVERGED"]


def test_what_is_equal_so_far_is_printed_once_and_soon_and_is_no_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def early(statuses: dict[str, int], reached: int = 2, code: int | None = None, undecided: int = 0) -> WatchedSearch:
        one = WatchedSearch(["f.py"], (), code=code)
        one.follow(search := looking("f.py:1", reached=reached, undecided=undecided))
        search.tally.statuses.update(statuses)
        one.answer_early()
        one.answer_early()
        return one

    early({"equal": 3})
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(watching, "_SOON", -1.0)
    for statuses, reached, code in (
        ({"equal": 1, "unknown": 2}, 2, None),
        ({"equal": 2, "diverged": 1}, 2, None),
        ({"equal": 3}, 0, None),
        ({"equal": 3}, 2, 0),
    ):
        early(statuses, reached, code)
    early({"equal": 1, "known": 1, "unknown": 1}, undecided=1)
    assert capsys.readouterr().out == ""
    one = early({"equal": 1, "known": 1, "unknown": 1})  # unknown, since it runs nothing of the change
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("EQUAL SO FAR  f: 2 of 3 cases ran it (1 of 1 statement); ")
    assert (one.code, one.verdicts) == (None, {})


def test_of_a_change_that_is_undone_the_verdict_is_known_at_once_and_the_search_may_alter_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = WatchedSearch([], ())
    first.follow(looking())
    first.answer(0)
    edited = WatchedSearch(["f.py"], (), first.verdicts)
    edited.follow(looking("f.py:1"))
    edited.answer(1)
    undone = WatchedSearch(["f.py"], (), edited.verdicts)
    undone.follow(looking())
    for code in (0, 1):
        undone.answer(code)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("; ")[0] for line in lines] == [
        "EQUAL  no change: 3 cases",
        "DIVERGED  f: 2 of 3 cases ran it (1 of 1 statement)",
        "EQUAL  as before",
        "DIVERGED  no change: 3 cases",
    ]


@pytest.mark.parametrize(
    "words", [(), ("--sglang", "0.5.23"), ("--sglang", ".", "--resume", "x"), ("--sglang", ".", "--shrink", "x")]
)
def test_it_is_of_a_tree_and_of_a_search_that_begins(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(lambda: run_command(["fuzz", "--watch", *words])) == EXIT_USAGE
    assert "give --sglang TREE" in capsys.readouterr().err


def test_a_search_on_a_gpu_says_why_no_case_ends(capsys: pytest.CaptureFixture[str]) -> None:
    looking: Any = SimpleNamespace(tally=SimpleNamespace(cases=2), seconds=31.0)
    with saying_that_kernels_compile(looking, every=0.01):
        while "compiled" not in (said := capsys.readouterr().err):
            time.sleep(0.01)
    assert "2 cases in 31 s: kernels are compiled when they are first used" in said


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


def test_cases_of_the_search_before_fill_up_what_are_too_few_to_say_that_the_change_is_right() -> None:
    leave(source(DOUBLE), (CASES[0], (2,)), (CASES[1], (2,)))
    found = Corpus(source(DOUBLE)).cases(further=CASES[2:3], recent=CASES[1:])
    assert found == (CASES[2], CASES[0], CASES[1], *CASES[3:LEAST])
    assert Corpus(source(DOUBLE)).cases(lambda case: case == CASES[1], recent=CASES[:4]) == (CASES[1],)
    leave(source(DOUBLE), *((case, (2,)) for case in CASES[: LEAST + 2]))
    assert not {*Corpus(source(DOUBLE)).cases(recent=CASES[LEAST + 2 :])} & {*CASES[LEAST + 2 :]}


def test_each_second_case_is_a_further_one() -> None:
    leave(source(DOUBLE), *((case, (2,)) for case in CASES[:LEAST]))
    further = (CASES[-1], CASES[1], CASES[-2])
    first = (CASES[-1], CASES[0], CASES[1], CASES[-2], CASES[2], *CASES[3:LEAST])
    assert Corpus(source(DOUBLE)).cases(further=further) == first
    assert Corpus(source(DOUBLE)).cases(lambda case: case != CASES[-1], further)[1] == CASES[1]
    assert Corpus(Source()).cases(further=further) == further


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
    matcher: Any = SimpleNamespace(run=DEFAULT_RUN, present=lambda case, view: ())
    runner = BlockRunner(matcher, SearchOptions(first=tuple(CASES[:3])).plan)
    before, own = (CaseSeen(block=of, case=case, verdict=EQUAL) for of, case in ((NO_BLOCK, CASES[2]), (0, CASES[3])))
    seen = [*runner.first((before, own)), *runner.block(0, (before, own))]
    assert seen == [CaseSeen(block=NO_BLOCK, case=CASES[0], verdict=EQUAL), Unstarted(CASES[1], "no", ours=False), own]
    assert list(runner.block(0)) == []
