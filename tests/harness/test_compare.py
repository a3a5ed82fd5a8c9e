"""`eagletwin compare`: two traces number for number, into which group two verdicts put a case, and what all groups say."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace as replaced
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from eagletwin.cases.blocks import AGAIN, Block, block_of
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.trials import Trial
from eagletwin.harness.cli.main import run_command
from eagletwin.harness.commands.compare import two
from eagletwin.harness.commands.compare.command import old_arguments
from eagletwin.harness.commands.compare.groups import (
    EQUAL,
    GROUPS,
    ComparedCase,
    Result,
    SharedCase,
    SideResult,
    breakages,
    cases_of_ledger,
    count_rounds,
    example_facts,
    group_of,
    select_entries,
)
from eagletwin.harness.commands.compare.report import CompareReport, document_of
from eagletwin.harness.commands.compare.report import facts_of as typed_facts_of
from eagletwin.harness.commands.compare.two import ComparisonRun, Sides, runs_as_base, said_by
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.steering import Steering
from eagletwin.harness.commands.result import AcceptedFacts, RoundsFacts
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Changes, Differs, with_executed
from eagletwin.harness.core.errors import AlreadyReported, HarnessError, InputError
from eagletwin.harness.core.records import Ending, EngineInfo, Header
from eagletwin.harness.core.run_spec import CPU, DEFAULT_RUN
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.trace import HEADER, Recorder, Trace, new_header, write_trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.source import resolve
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.valid import strangers_trace
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.trace_diff import diff
from eagletwin.harness.page.render import code, plain
from eagletwin.harness.page.render import markdown_of as comment_of
from eagletwin.harness.page.render import text_of as rendered

# `eagletwin compare`: into which group two verdicts put a case, what all groups say together, and what the comment escapes.


CASE = LEDGER["25015"].case
ENGINE = EngineInfo(name="none", version="0", device="cpu", kernels="none", torch="0", triton="0")
WRONG = SideResult("broken", "wrong", Signature(rule="draft.positions", stage="draft.decode"))
OTHER = SideResult("broken", "other", Signature(rule="draft.kv", stage="draft.extend"))
CRASH = SideResult("broken", "fell", Signature(rule="engine.crash", cause="KeyError in f"))
UNDECIDED = SideResult("unknown", "3 of 7 choices are ties")
REFUSED = SideResult("unknown", "SGLang does not run this configuration")

PAIRS = {
    (EQUAL, EQUAL): "as before",
    (EQUAL, WRONG): "newly broken",
    (EQUAL, CRASH): "newly broken",
    (WRONG, EQUAL): "newly fixed",
    (CRASH, EQUAL): "newly fixed",
    (WRONG, WRONG): "still diverged",
    (CRASH, CRASH): "still diverged",
    (WRONG, OTHER): "diverged otherwise",
    (WRONG, CRASH): "diverged otherwise",
    (UNDECIDED, EQUAL): "unknown",
    (EQUAL, UNDECIDED): "unknown",
    (WRONG, UNDECIDED): "unknown",
    (UNDECIDED, WRONG): "unknown",
    (REFUSED, REFUSED): "unknown",
}


def answered(base: SideResult, head: SideResult, **more: object) -> ComparedCase:
    return ComparedCase(SharedCase("one", CASE), base, head, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("base", "head"), PAIRS)
def test_two_sides_are_sorted_into_a_group(base: SideResult, head: SideResult) -> None:
    assert group_of(base, head) == PAIRS[base, head]
    assert set(PAIRS.values()) == set(GROUPS)


AS_BEFORE, BROKEN, OPEN = answered(EQUAL, EQUAL), answered(EQUAL, WRONG), answered(EQUAL, UNDECIDED)
RESULTS = {
    "all as before": ([AS_BEFORE], 0, "NONE NEWLY WRONG"),
    "fixed, and still diverged": ([AS_BEFORE, answered(WRONG, EQUAL), answered(OTHER, OTHER)], 0, "NONE NEWLY WRONG"),
    "broken": ([AS_BEFORE, BROKEN], 1, "1 NEWLY BROKEN"),
    "broken, and another fixed": ([BROKEN, answered(WRONG, EQUAL)], 1, "1 NEWLY BROKEN"),
    "broken, and another cannot be told": ([OPEN, answered(WRONG, OTHER), BROKEN], 1, "1 NEWLY BROKEN"),
    "HEAD cannot be told": ([AS_BEFORE, OPEN], 125, "CANNOT TELL"),
    "HEAD is wrong, and BASE cannot be told": ([AS_BEFORE, answered(UNDECIDED, WRONG)], 125, "CANNOT TELL"),
    "HEAD is right, and BASE cannot be told": ([AS_BEFORE, answered(UNDECIDED, EQUAL)], 0, "NONE NEWLY WRONG"),
    "neither can be told, for one reason": ([AS_BEFORE, answered(REFUSED, REFUSED)], 0, "NONE NEWLY WRONG"),
    "neither can be told, for two reasons": ([AS_BEFORE, answered(REFUSED, UNDECIDED)], 125, "CANNOT TELL"),
    "wrong otherwise": ([AS_BEFORE, answered(WRONG, OTHER)], 125, "CANNOT TELL"),
    "nothing else than refused": ([answered(REFUSED, REFUSED)], 125, "CANNOT TELL"),
    "nothing at all": ([], 125, "CANNOT TELL"),
}


@pytest.mark.parametrize("what", RESULTS)
def test_all_groups_together_have_one_exit_code(what: str) -> None:
    answers, exit_code, word = RESULTS[what]
    result = Result(answers)
    assert (result.exit_code, result.word) == (exit_code, word)
    assert "none is newly wrong" in result.sentence if exit_code == 0 else "none is" not in result.sentence
    assert exit_code == 0 or result.sentence.startswith({1: "HEAD is wrong where", 125: "Cannot tell: "}[exit_code])


def test_a_change_that_did_not_run_is_told_nothing_of_unless_something_broke() -> None:
    doubt = ("this tree differs from 0.5.23 in f, and the case runs none of it",)
    assert Result([AS_BEFORE], doubt).exit_code == 125
    assert "none of the changed functions ran" in Result([AS_BEFORE], doubt).sentence
    assert Result([AS_BEFORE, BROKEN], doubt).exit_code == 1
    assert Result([], failed="HEAD: SGLang cannot be imported").sentence.startswith(
        "Cannot tell: HEAD: SGLang cannot be imported"
    )


def header(*lengths: int, ending: str = "finished") -> Header:
    recorder = Recorder()
    for number, length in enumerate(lengths):
        recorder.add("a", number, "verify", numbers={"accept_len": length})
    return new_header(CASE, "", ENGINE, Ending(kind=ending), recorder.records)  # type: ignore[arg-type]


DIFFERS = Differs(base="0.5.23", functions=("sglang.m.f",))
UNRUN = Verdict(status="unknown", reason=DIFFERS.doubt, vacuous=True, exercised=("draft_decode",))


def test_a_case_that_runs_no_change_counts_for_what_it_compared() -> None:
    trial = Trial(CASE, UNRUN, header(), (), differs=DIFFERS)
    assert said_by(trial) == EQUAL
    idle = Verdict(status="unknown", reason=DIFFERS.doubt, vacuous=True)  # and does not do what it is for
    assert said_by(Trial(CASE, idle, header(), (), differs=DIFFERS)).status == "unknown"
    other = Verdict(status="unknown", reason="the case is for 'tree', which did not happen", vacuous=True)
    assert said_by(Trial(CASE, other, header(), (), differs=DIFFERS)).status == "unknown"


def test_base_is_left_out_only_where_all_that_differs_is_functions_that_were_not_called() -> None:
    assert runs_as_base(DIFFERS)
    for what in ({"ran": ("sglang.m.f",)}, {"modules": ("sglang.m",)}, {"removed": ("sglang.m.g",)}, {"files": ("a.cu",)}):
        assert not runs_as_base(replace(DIFFERS, **what))
    assert not runs_as_base(None)
    assert not runs_as_base(Differs(base="0.5.23"))


def test_a_crash_is_broken_and_another_end_is_unknown() -> None:
    crash = Verdict(status="unknown", rule="engine.crash", reason="KeyError:\n  'a'")
    said = said_by(Trial(CASE, crash, header(ending="crashed"), ()))
    assert (said.status, said.line) == ("broken", "engine.crash: KeyError: 'a'")
    assert said_by(Trial(CASE, Verdict(status="unknown", reason="ties", undecided=True), header(), ())).status == "unknown"


def accepted(model: str, shape: str, base: tuple[int, int], head: tuple[int, int]) -> AcceptedFacts:
    found = AcceptedFacts(model, shape)
    found.add(base, head)
    return found


def test_tokens_a_round_are_counted_where_both_sides_finished() -> None:
    found: dict[tuple[str, str], AcceptedFacts] = {}
    count_rounds(found, SharedCase("one", CASE), header(3, 3), (3, 6))
    count_rounds(found, SharedCase("two", CASE), header(1, ending="crashed"), (1, 1))
    count_rounds(found, SharedCase("three", CASE), header(1), (0, 0))  # HEAD did not finish
    [one] = found.values()
    assert one == AcceptedFacts("llama-tiny", "chain", 1, RoundsFacts(2, 6, 3.0), RoundsFacts(3, 6, 2.0), "-33.3%")
    assert accepted("m", "tree", (2, 6), (2, 6)).change == "same"
    none = accepted("m", "tree", (0, 0), (2, 6))
    assert (none.base.mean, none.change) == (None, "")


def steered(runs: Callable[[Block], bool], blocks: int) -> list[Block]:
    """The first blocks of a comparison whose cases run the change where `runs` says so."""
    steering, found = Steering(0, SearchOptions().constraints), list[Block]()
    for block in islice(steering.blocks(), blocks):
        found.append(block)
        steering.add(block.probe, ("a.py:1",) if runs(block) else (), block.number)
    return found


@pytest.mark.parametrize("often", [True, False])
def test_where_no_case_or_every_case_runs_the_change_the_blocks_are_those_of_fuzz(often: bool) -> None:
    asked = SearchOptions().constraints
    assert steered(lambda block: often, 12) == [block_of(0, number, asked) for number in range(12)]


def test_blocks_that_may_run_a_rare_change_come_early_and_no_other_is_left_out() -> None:
    def keeps_states(block: Block) -> bool:
        return RECIPES[block.focus.model].target.states > 0

    first, asked = steered(keeps_states, 60), SearchOptions().constraints
    assert sum(map(keeps_states, first)) >= 4 * sum(keeps_states(block_of(0, number, asked)) for number in range(60))
    assert len({block.number for block in first}) == 60
    assert {block.number for block in first} > set(range(6))  # one block of ten
    again = [block for block in first if block.number >= AGAIN]
    assert 20 <= len(again) <= 40  # two of three, once a block ran it, until every second case does
    assert len({block.number % AGAIN for block in again}) >= 3
    for block in again:
        assert replaced(block, number=block.number % AGAIN) == block_of(0, block.number % AGAIN, asked)
    assert again[0].cases() != block_of(0, again[0].number % AGAIN, asked).cases()
    assert first == steered(keeps_states, 60)


def test_the_ledger_is_asked_as_the_tree_is_and_once() -> None:
    asked = cases_of_ledger(select_entries(["25015", "8409", "25015"]), CPU)
    assert [(one.name, one.view) for one in asked] == [("25015", "slot_layout"), ("8409", "true_tree")]
    assert select_entries(["none"]) == []
    assert not any(one.name == "context-end-stores" for one in cases_of_ledger(select_entries(["all"]), CPU))
    with pytest.raises(InputError, match="and other entries as well"):
        select_entries(["none", "25015"])


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(InputError, match="--markdown and --json"):
        run_command(["compare", "a", "b", "--markdown", "--json"])
    with pytest.raises(InputError, match="no entry of the ledger"):
        run_command(["compare", "a", "b", "--cases", "0", "--ledger", "none"])


def facts_of(one: CompareReport) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(typed_facts_of(one))
    return found


def text_of(one: CompareReport, columns: int) -> str:
    return rendered(document_of(typed_facts_of(one), Path("runs")), columns)


def markdown_of(one: CompareReport) -> str:
    return comment_of(document_of(typed_facts_of(one), Path("runs")))


HOSTILE = "a|b `c` <script>alert(1)</script> @someone #1 [x](http://y) **z** \\| $e$\nnext & so"


def comparing(answers: list[ComparedCase], **more: object) -> CompareReport:
    given: dict[str, object] = {
        "result": Result(answers),
        "names": ("0.5.23", HOSTILE),
        "versions": ("0.5.23", "1a2b3c4d5e"),
        "command": f"eagletwin compare 0.5.23 '{HOSTILE}'",
        "folder": Path("runs"),
        "seconds": 1.5,
        "changes": (Changes(), Changes(Differs(base=HOSTILE, functions=(HOSTILE,)), {}, 3)),
        "mutual": True,
    }
    return CompareReport(**{**given, **more})  # type: ignore[arg-type]


def test_hostile_text_is_no_markdown() -> None:
    for escaped in (plain(HOSTILE), code(HOSTILE)):
        text = escaped.removeprefix("<code>").removesuffix("</code>")
        assert not set("|`<>@[]*\\$\n") & set(text), escaped
        assert "&lt;script&gt;" in text
    assert plain("input_ids of _f, __g__ at www.x.org and x.py:5") == (
        "input_ids of &#95;f, &#95;&#95;g&#95;&#95; at www&#46;x.org and x.py&#58;5"
    )
    assert code("sglang.m.f") == "`sglang.m.f`"
    assert code("<script>") == "`<script>`"  # a code span shows it as it is
    assert code("a | b") == "<code>a &#124; b</code>"


def test_the_comment_has_whole_tables_and_no_tag_of_others() -> None:
    said = SideResult("broken", HOSTILE, WRONG.signature)
    answers = [answered(EQUAL, said, again=HOSTILE), answered(WRONG, EQUAL), answered(said, said)]
    text = markdown_of(comparing(answers, accepted=[accepted("llama-tiny", "chain", (2, 6), (3, 6))]))
    assert text.startswith("## eagletwin: 1 newly broken\n\n**HEAD is wrong where BASE is right")
    rows = [line for line in text.split("\n") if line.startswith("| ")]
    words = [row.split(" | ")[0] for row in rows if row.count("|") == 5 and not row.startswith("| |")]
    assert words == ["| newly fixed", "| still diverged"]
    assert {row.count("|") for row in rows if "newly" in row or "still" in row} == {5}
    assert "<script" not in text
    assert "@someone" not in text
    assert text.count("<details>") == text.count("</details>") == 1
    assert "<summary>Changed functions: 0 run, 1 not run</summary>" in text
    assert "| llama-tiny | chain | 1 | 3.000 | 2.000 | **-33.3%** |" in text


def test_a_report_for_a_terminal_names_each_case_and_what_to_type() -> None:
    broken = answered(EQUAL, WRONG, again="eagletwin check 25015 --sglang pr", folder=Path("runs/broken-one"))
    text = text_of(comparing([broken, answered(OTHER, OTHER, known="8409")], left=4, unreached=("context-end-reads",)), 80)
    assert text.startswith("1 NEWLY BROKEN  HEAD ")
    assert "    draft.positions (draft.decode), 1 case: one\n      HEAD: wrong.\n" in text
    assert "      again:  eagletwin check 25015 --sglang pr\n      folder: runs/broken-one\n" in text
    assert "known live bugs: 1 case diverged by them on both sides" in " ".join(text.split())
    assert "one: other" not in text
    said = " ".join(text.split())
    assert "4 more of the ledger did not run" in said
    assert "Not reached in this mode: context-end-reads." in said


@pytest.mark.parametrize("ended", [129, 130])
def test_a_comparison_that_was_ended_is_no_success_and_claims_nothing_of_the_rest(ended: int) -> None:
    answers = [replaced(AS_BEFORE, reached=True), replaced(AS_BEFORE, reached=False)]
    one = comparing(answers, left=86, ended=ended, names=("0.5.23", "tree"), changes=(Changes(), Changes()), command="again")
    facts, comment = facts_of(one), markdown_of(one)
    assert (facts["exit_code"], facts["interrupted"], facts["result"]) == (ended, True, "cannot tell")
    assert comment.startswith(
        "## eagletwin: interrupted\n\n**Ended before it was done: 1 of 2 cases ran the change, and nothing"
    )
    assert "86 more of the ledger did not run" in comment
    for text in (comment, text_of(one, 80), facts["sentence"]):
        assert not re.search("newly|nothing new|breaks", text.partition("Tokens a round")[0], re.IGNORECASE)
    broken = comparing([BROKEN], ended=ended)
    assert text_of(broken, 80).startswith("INTERRUPTED, 1 NEWLY BROKEN")
    assert markdown_of(broken).splitlines()[2].startswith("**HEAD is wrong where BASE is right")


def test_a_comparison_without_a_finding_says_how_many_cases_ran_the_change_and_what_had_none() -> None:
    answers = [replaced(AS_BEFORE, reached=number < 24) for number in range(110)]
    one = comparing(answers, not_looked_at=["requests that sample (--only sampling)"], known=["8409"], words=["--seed", "3"])
    comment = markdown_of(one)
    assert "\n**24 of 110 cases ran the change; none is newly wrong: 110 as before.**\n" in comment
    for text in (comment, text_of(one, 300), json.dumps(facts_of(one))):
        assert "breaks nothing" not in text
        assert "requests that sample (--only sampling)" in text
    assert facts_of(one)["ran_change"] == 24
    assert comment.endswith("\nAgain: `eagletwin compare BASE HEAD --seed 3`")
    assert "generated cases ran with the fixes of 8409" in comment
    unknown = Result([AS_BEFORE]).sentence
    assert unknown == "1 case was compared; none is newly wrong: 1 as before."


def test_a_comparison_in_which_few_cases_ran_the_change_cannot_tell() -> None:
    answers = [replaced(AS_BEFORE, reached=number < 9) for number in range(40)]
    few = comparing(answers, result=Result(answers, least=10))
    assert few.exit_code == 125
    assert "Cannot tell: 9 of 40 cases ran the change, and fewer than 10 say too little of it" in text_of(few, 200)
    assert comparing(answers, result=Result([*answers, replaced(AS_BEFORE, reached=True)], least=10)).exit_code == 0
    unknown = [replaced(AS_BEFORE, reached=None)]
    assert comparing(unknown, result=Result(unknown, least=10)).exit_code == 0
    assert comparing([BROKEN], result=Result([BROKEN], least=10)).exit_code == 1


def test_the_comment_begins_with_the_finding_and_its_case_and_has_no_path() -> None:
    answers = many(3, WRONG, "chain") + [answered(OTHER, OTHER, known="8409")] * 40
    more = {"changes": ("--remedy", "8409"), "again": "again /a/path", "folder": "/a/path"}
    [broken] = breakages(answers)
    small = example_facts(broken, CASE, DEFAULT_RUN, line="draft.positions at draft.decode", **more)  # type: ignore[arg-type]
    one = comparing(answers, examples={WRONG.signature: small}, names=("/a/base", "/a/head"), command="compare /a/base /a/head")
    comment = markdown_of(one)
    finding, _, rest = comment.partition("generated cases and")
    assert comment.index("### draft.positions (draft.decode), 3 cases: chain-0, chain-1, chain-2\n") < len(finding)
    assert rest.count("SGLang 0.5.23\n* HEAD: SGLang 1a2b3c4d5e\n") == 1
    assert "HEAD: draft.positions at draft.decode." in finding
    assert "Changed functions that each of the cases runs: sglang.m.f." in finding
    [text] = re.findall("\n```json\n(.*?)\n```\n", finding, re.DOTALL)
    assert msgspec.json.decode(text, type=Case) == CASE
    assert "As `case.json`: `eagletwin check case.json --remedy 8409 --sglang HEAD`" in finding
    assert "/a/" not in comment
    assert "| still diverged" not in rest
    assert "known live bugs: 40 cases diverged by them on both sides." in rest


def test_what_differs_is_listed_once() -> None:
    functions = tuple(f"sglang.m.f{number}" for number in range(3))
    statements = {name: (f"m.py:{number}",) for number, name in enumerate(functions)}
    sides = [Differs(base=side, functions=functions, statements=statements) for side in ("HEAD", "BASE")]
    base, head = (Changes(with_executed(differs, ["m.py:0"]), {functions[0]: 2}, of=3) for differs in sides)
    for text in (markdown_of(one := comparing([AS_BEFORE], changes=(base, head))), text_of(one, 200)):
        assert [text.count(name) for name in functions] == [1, 1, 1]
    alone = Differs(base="HEAD", functions=(*functions, "sglang.m.gone"), ran=("sglang.m.gone",))
    one = comparing([AS_BEFORE], changes=(Changes(alone, {"sglang.m.gone": 1}, of=3), head))
    assert "Run in BASE, which alone has them: sglang.m.gone." in text_of(one, 200)


@pytest.mark.slow  # it asks where the installed SGLang lies
@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (HarnessError("a", consequence="b", remedy="c"), 129)])
def test_stdout_holds_one_value_however_a_comparison_ends(
    error: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(*_: object, **__: object) -> None:
        raise error

    tree = tmp_path / "tree" / "sglang"
    tree.mkdir(parents=True)
    (tree / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eagletwin.harness.commands.compare.two.ComparisonRun._ask", ends)
    with pytest.raises((AlreadyReported, HarnessError)):
        run_command(["compare", "0.5.23", "tree", "--ledger", "none", "--cases", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["exit_code"] == code
    assert json.loads((tmp_path / "eagletwin-runs" / "compare" / "comparison.json").read_text())["exit_code"] == code


@pytest.mark.parametrize(("every", "ran"), [(False, ["26329"]), (True, ["26329", "row-overflow"])])
def test_a_bug_that_both_sides_have_by_their_code_is_counted_and_not_run(
    every: bool, ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake(Sides):
        def believes(self, question: SharedCase) -> bool:
            return question.name == "row-overflow" and not self.every

        def ask(self, question: SharedCase) -> ComparedCase:
            return ComparedCase(question, EQUAL, EQUAL)

    host = SimpleNamespace(connection=lambda: None, source=resolve("0.5.23"), mode=CPU, beside=lambda *_: host)
    monkeypatch.setattr(two, "Sides", Fake)
    plan = SearchOptions(max_cases=0).plan
    questions = cases_of_ledger(select_entries(["26329", "row-overflow"]), CPU)
    names = ("0.5.23", "0.5.22")
    one = ComparisonRun(
        names=names, questions=questions, every=every, plan=plan, words=(), unreached=(), run=DEFAULT_RUN, out=tmp_path
    )
    one._ask((host, host), None, tmp_path)  # type: ignore[arg-type]
    sources = host.source, host.source
    seen = one._comparing(sources, tmp_path, 1.0, mutual=False, ended=None)
    facts = facts_of(seen)
    assert [answer["name"] for answer in facts["answers"]] == ran
    assert (facts["believed"], facts["not_run"]) == ([] if every else ["row-overflow"], 0)
    assert ("1 live bug of SGLang did not run: both sides have the code of 0.5.23" in seen.remarks[0]) == (not every)
    assert ("1 live bug" in markdown_of(seen)) == (not every)


OLD = {
    ("ci", "--sglang", "tree", "--base", "HEAD^1", "--minutes", "3"): "tree --base HEAD^1 --minutes 3",
    ("ci", "--sglang=tree"): "tree",
    ("ci", "--ledger", "none"): "--ledger none",
    ("diff", "a", "b", "--lines", "3"): "a b --lines 3",
    ("diff", "25015", "--sglang", "0.5.22", "--sglang", "tree", "--tp", "2"): "0.5.22 tree --case 25015 --tp 2",
}


@pytest.mark.parametrize("old", OLD)
def test_the_arguments_of_old_commands_are_translated(old: tuple[str, ...]) -> None:
    assert old_arguments(list(old[1:]), old[0]) == OLD[old].split()


@pytest.mark.parametrize("words", ["25015 --sglang 0.5.22", "--tp 2 25015 --sglang 0.5.22 --sglang tree"])
def test_old_arguments_that_cannot_be_translated_are_refused_with_the_new_command(words: str) -> None:
    with pytest.raises(InputError) as refused:
        old_arguments(words.split(), "diff")
    assert re.match(r"eagletwin compare (BASE HEAD|0.5.22 tree) --case CASE$", refused.value.remedy)


def many(count: int, side: SideResult, name: str) -> list[ComparedCase]:
    folder = Path(f"runs/broken-{name}-0")
    return [
        ComparedCase(
            SharedCase(f"{name}-{n}", CASE), EQUAL, side, folder=None if n else folder, ran=("sglang.m.f", f"sglang.m.g{n}")
        )
        for n in range(count)
    ]


def test_a_bug_that_many_cases_show_is_read_once_with_one_example() -> None:
    answers = [*many(25, WRONG, "chain"), *many(2, CRASH, "tree"), *many(1, OTHER, "layers")]
    more: Any = {"changes": (), "again": "again", "folder": "runs/broken-chain-0/minimal", "partial": True}
    small = example_facts(breakages(answers)[0], replace(CASE, name="small"), DEFAULT_RUN, line="small", **more)
    one = comparing(answers, examples={WRONG.signature: small})
    assert [(str(broken.signature), len(broken.answers)) for broken, _ in one.broken] == [
        ("draft.positions (draft.decode)", 25),
        ("engine.crash (KeyError in f)", 2),
        ("draft.kv (draft.extend)", 1),
    ]
    assert one.result.word == "3 NEWLY BROKEN"
    text = text_of(one, 200)
    assert text.count("Newly broken:") == 1
    assert "draft.positions (draft.decode), 25 cases: chain-0, chain-1," in text
    assert "chain-7 and 17 more\n      HEAD: small." in text
    assert "chain-8" not in text
    assert "Changed functions that each of the cases runs: sglang.m.f.\n" in text
    assert "Not minimal: time was up." in text
    comment = markdown_of(one)
    assert comment.count("\n### ") == 3
    assert "\n### draft.positions (draft.decode), 25 cases: chain-0, " in comment
    facts = facts_of(one)
    assert (facts["result"], facts["counts"]["newly broken"]) == ("newly broken", 28)
    assert [len(broken["cases"]) for broken in facts["broken"]] == [25, 2, 1]
    assert facts["broken"][0]["example"]["folder"] == "runs/broken-chain-0/minimal"


def test_programs_read_an_object_whose_fields_are_documented() -> None:
    rounds = [accepted("llama-tiny", "chain", (2, 6), (3, 6))]
    facts = json.loads(json.dumps(facts_of(comparing([BROKEN, AS_BEFORE], accepted=rounds))))
    assert (facts["result"], facts["exit_code"]) == ("newly broken", 1)
    assert facts["counts"] == {group: int(group in ("newly broken", "as before")) for group in GROUPS}
    assert facts["answers"][0]["head"] == {"status": "broken", "rule": "draft.positions", "line": "wrong"}
    assert facts["functions"]["head"]["not_run"] == [HOSTILE]
    guide = (Path(__file__).parents[2] / "docs/guide/compare.md").read_text().partition("## `--json`")[2]
    broken = facts["broken"][0]
    fields = ["broken", "answers", "functions", "acceptance", *facts["answers"][0]]
    fields += [*broken, *broken["example"], *facts["functions"]["head"]]
    assert broken["example"]["case"]["model"] == CASE.model
    fields += [*facts["acceptance"][0], "rounds", "tokens", "mean"]
    assert not [name for name in fields if f"`{name}`" not in guide]


# Two traces compared number for number, without an engine.


COMPARISON_CASE = LEDGER["25015"].case
COMPARISON_ENGINE = EngineInfo(name="none", version="0", device="cpu", kernels="none", torch="0", triton="0")
NAN, INF = float("nan"), float("inf")


def of(values: Tensor) -> Trace:
    recorder = Recorder()
    recorder.add(COMPARISON_CASE.requests[0].id, 0, "prefill", numbers={"end": 1}, tensors={"proposal_hidden": values})
    header = new_header(
        COMPARISON_CASE, model_pair(COMPARISON_CASE.model).digest, COMPARISON_ENGINE, Ending(kind="finished"), recorder.records
    )
    return Trace(header, dict(recorder.tensors))


@pytest.mark.parametrize("values", [(NAN, 1.0), (NAN, NAN), (INF, -INF)])
def test_a_trace_is_the_same_as_itself_whatever_it_holds(values: tuple[float, ...]) -> None:
    result = diff(of(torch.tensor(values)), of(torch.tensor(values)))
    assert result.compared
    assert result.same
    assert not result.differences


@pytest.mark.parametrize(
    ("left", "right", "element"),
    [((NAN, 1.0), (NAN, 2.0), 1), ((NAN, 1.0), (1.0, 1.0), 0), ((INF, 1.0), (-INF, 1.0), 0)],
)
def test_what_differs_next_to_a_shared_nan_is_a_difference(
    left: tuple[float, ...], right: tuple[float, ...], element: int
) -> None:
    result = diff(of(torch.tensor(left)), of(torch.tensor(right)))
    assert not result.same
    assert result.differences[0].where.endswith(f"element {element}")


def test_a_nan_of_other_bits_is_another_number() -> None:
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert not diff(of(torch.tensor([NAN])), of(other)).same


def test_a_request_that_finished_without_a_record_of_its_work_has_no_verdict() -> None:
    recorder = Recorder()
    tokens = torch.tensor([*COMPARISON_CASE.requests[0].prompt, 1])
    recorder.add(
        COMPARISON_CASE.requests[0].id, 0, "finished", numbers={"aborted": 0, "dropped": 1}, tensors={"tokens": tokens}
    )
    header = new_header(
        COMPARISON_CASE, model_pair(COMPARISON_CASE.model).digest, COMPARISON_ENGINE, Ending(kind="finished"), recorder.records
    )
    verdict = judge(Trace(header, dict(recorder.tensors)))
    assert verdict.status == "unknown"
    assert verdict.reason.endswith("nothing was recorded")


def test_a_trace_of_a_stranger_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    """Whoever makes one seals it."""
    trace = of(torch.tensor([1.0]))
    write_trace(tmp_path, trace.header, trace.tensors)
    strangers_trace(tmp_path)
    file = tmp_path / HEADER
    seal = msgspec.json.decode(file.read_bytes())["sha256"].encode()
    text = file.read_bytes().replace(b'"schema":', b'"schema":1,"schema":', 1).replace(seal, b"")
    file.write_bytes(text.replace(b'"sha256":""', b'"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'"'))
    with pytest.raises(InputError, match="the key 'schema' is given twice"):
        strangers_trace(tmp_path)
