"""Options of `fuzz`, what a search says at its end, and what tells two findings apart."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from msgspec.structs import replace as changed

from eagletwin.cases import blocks
from eagletwin.cases.blocks import block_of, cases_on
from eagletwin.cases.ledger import LEDGER, case_of
from eagletwin.cases.strategies import MODELS, ON_REQUEST, Focus
from eagletwin.harness.check.trials import check
from eagletwin.harness.cli.main import run_command as entered
from eagletwin.harness.commands.fuzz import command as fuzz_command
from eagletwin.harness.commands.fuzz.coverage import TOPICS, VALUES, has, not_looked_at
from eagletwin.harness.commands.fuzz.looking import CaseSeen, Unstarted
from eagletwin.harness.commands.fuzz.options import Plan, SearchOptions
from eagletwin.harness.commands.fuzz.report import document_of, exit_code, summary_facts, write_summary
from eagletwin.harness.commands.fuzz.search import Fuzz
from eagletwin.harness.commands.fuzz.shrinking import smaller
from eagletwin.harness.commands.fuzz.tally import SUMMARY
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.differs import Differs
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_INTERRUPTED, EXIT_UNKNOWN, InputError, run_guarded
from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.run_spec import CPU, DEFAULT_ENGINE, DEFAULT_RUN, Mode, RunSpec, chosen_engine
from eagletwin.harness.core.signature import Signature, signature_of, without_numbers
from eagletwin.harness.core.verdict import Divergence, Verdict
from eagletwin.harness.families.dimensions.dimension import Dimension
from eagletwin.harness.families.valid import check_case, not_driven, runs_in
from eagletwin.harness.page.render import NAME, text_of

from ..rows import long, rows

# Options of `fuzz`: two that contradict each other are refused, and every generated case has the features that are named.


CONTRADICTIONS = [
    line.strip()
    for line in """\
    --only small-trees --only llama-mtp --only topk=2
    --only loops
    --only topk=5
    --only context-length=7
    --not updates=foo
    --findings -1
    --attention flashinfer
    --attention flashmla
    --kernels shadow --dtype bfloat16
    --kernels interpreter --dtype bfloat16
    --tp 3
    --without draft.magic""".splitlines()
]
# What is refused after ten seconds of drawing: no case has it.
IN_VAIN = [
    "--only rejection --only topk=4",
    "--only min-p --not sampling",
    "--only updates=tensor --only llama-eagle3-full",
    "--view true_tree --only chains",
    "--view committed --only llama-tiny",
]


@pytest.mark.parametrize("refused", [CONTRADICTIONS, *long(IN_VAIN)], ids=["at once", "in vain"])
def test_options_that_contradict_each_other_are_refused_before_anything_slow_is_imported(
    tmp_path: Path, refused: list[str]
) -> None:
    program = (
        "import sys\nfrom eagletwin.harness.cli.main import run_command as entered\n"
        "from eagletwin.harness.core.errors import run_guarded as guarded\n"
        f"for typed in {refused}:\n"
        "    code = guarded(lambda: entered(['fuzz', *typed.split()]))\n"
        "    print(code, 'torch' in sys.modules, 'eagletwin.harness.engines.host' in sys.modules, typed)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"128 False False {typed}" for typed in refused]
    assert done.stderr.count("\n  try: ") == len(refused)
    assert "use one of ," not in done.stderr
    assert not list(tmp_path.iterdir())


MODES = (
    *(CPU, Mode(overlap=True), Mode(tp=2), Mode(pp=2), Mode(dtype="bfloat16"), Mode(device="cuda", graphs=(1, 2))),
    Mode(device="cuda", graphs=(1, 2), dtype="bfloat16", attention="flashinfer"),
)


@pytest.mark.parametrize("mode", rows(MODES))
def test_a_search_that_is_narrowed_to_a_topic_has_it_in_every_block(mode: Mode) -> None:
    """Each topic on a CPU and in one of the other modes."""
    narrowed(mode, TOPICS if mode == CPU else TOPICS[MODES.index(mode) - 1 :: len(MODES) - 1])


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_search_in_any_mode_that_is_narrowed_to_any_topic_has_it_in_every_block(mode: Mode) -> None:
    refused = narrowed(mode, TOPICS)
    for topic in refused[:1]:  # it takes seconds
        with pytest.raises(InputError, match=f"no generated case has --only {topic.key}"):
            SearchOptions(only=(topic.key,), run=RunSpec(mode=mode)).check()


def narrowed(mode: Mode, topics: Sequence[Dimension]) -> list[Dimension]:
    """The things that a block is to have come in turn, some of them not in every cycle of turns, and with a value that the mode
    does not run in some. What the mode runs in no case is what the page says is to be had without it: these topics are
    returned."""
    lines = not_looked_at((), (), mode)
    asked = {topic: SearchOptions(only=(topic.key,), run=RunSpec(mode=mode)) for topic in topics}
    drawn = [topic for topic in topics if f"{topic.words} (--only {topic.key})" in lines]
    assert drawn
    for topic in drawn:
        probes = [block_of(0, number, asked[topic].constraints).probe for number in range(0, 40, 16)]
        assert all(topic.has(probe) and runs_in(probe, mode) for probe in probes), topic.key
    return [topic for topic in topics if topic not in drawn]


def test_pages_that_are_never_drawn_are_said_to_be_what_an_attention_backend_takes() -> None:
    mode = Mode(device="cuda", graphs=(1, 2), dtype="bfloat16", attention="flashmla")
    with pytest.raises(InputError, match="flashmla takes pages of 64, and no generated case has more than 16"):
        SearchOptions(run=RunSpec(mode=mode)).check()


def test_the_command_of_a_search_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every option that it writes: --not once was one that no parser knew."""
    typed: list[SearchOptions] = []
    monkeypatch.setattr(fuzz_command, "search", lambda options, **_: typed.append(options) or 0)
    options = SearchOptions(only=("trees", "topk=4,llama-gqa"), left_out=("sampling", "context-end"), minutes=2.0)
    assert run_guarded(lambda: entered(shlex.split(options.command)[1:])) == 0
    [again] = typed
    assert (again.only, again.left_out) == (options.only, options.left_out)
    assert again.command == options.command


CONSTANT = (
    *VALUES,
    "chains",
    "trees",
    "small-trees",
    "updates",
    "rejection",
    "sampling",
    *MODELS,
    *ON_REQUEST,
)  # in each block


def drawn(options: SearchOptions, blocks: int) -> list[Case]:
    return [case for number in range(blocks) for case in block_of(options.seed, number, options.constraints).cases()]


@pytest.mark.parametrize("feature", rows(CONSTANT, 6))
def test_every_generated_case_has_a_feature_of_its_engine(feature: str) -> None:
    on_vllm = feature == "mimo" or feature.startswith("model-runner")
    mode = Mode(engine="vllm" if on_vllm else "sglang", dtype="bfloat16" if feature == "deepseek-v4" else "float32")
    for case in drawn(SearchOptions(only=(feature,), run=RunSpec(mode=mode)), 1):
        assert has(case, feature)
        check_case(case, "generated")


@pytest.mark.parametrize(
    ("only", "left_out", "samples", "rejects"),
    [
        ((), ("sampling",), {False}, {False}),
        (("sampling",), ("rejection",), {True}, {False}),
        (("rejection",), (), {True}, {True}),
        (("sampling",), (), {True}, {False, True}),
    ],
)
def test_all_requests_sample_in_the_way_that_is_chosen(
    only: tuple[str, ...], left_out: tuple[str, ...], samples: set[bool], rejects: set[bool]
) -> None:
    asked = SearchOptions(only=only, left_out=left_out).constraints
    cases = [block_of(0, number, asked).probe for number in range(40)]
    assert {case.samples for case in cases} == samples
    assert {case.engine.sglang.rejection_sampling for case in cases} == rejects


@pytest.fixture
def fewer_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the drawings until a search gives up."""
    monkeypatch.setattr(blocks, "_TRIES", 2000)


@pytest.mark.usefixtures("fewer_tries")
def test_two_features_that_no_case_has_are_named() -> None:
    options = SearchOptions(only=("llama-tiny", "trees", "rejection"), left_out=("stream",))
    with pytest.raises(InputError, match=r"no generated case has --only trees and --only rejection\n"):
        options.check()


@pytest.mark.usefixtures("fewer_tries")
def test_a_type_that_a_model_needs_is_named() -> None:
    with pytest.raises(InputError, match=r"no generated case has --only deepseek-v4\n(?s:.*)give --dtype bfloat16"):
        SearchOptions(only=("deepseek-v4",)).check()


@pytest.mark.long
def test_a_feature_that_no_case_has_in_a_mode_is_named_with_the_mode() -> None:
    with pytest.raises(InputError, match=r"no generated case has --only plain-decode with --tp 2\n"):
        SearchOptions(only=("plain-decode",), run=RunSpec(mode=Mode(tp=2))).check()


def test_the_command_that_searches_again_has_all_that_was_typed() -> None:
    options = SearchOptions(only=("topk=2",), out=Path("a b"), run=RunSpec(kernels="checked", release="my tree"), minutes=1.0)
    assert options.command == "eagletwin fuzz --seed 0 --minutes 1.0 --only topk=2 --sglang 'my tree' --kernels checked"


# What a search says at its end, of what it met.


NEEDS_OVERLAP = "retracted-stream"


def searched(
    folder: Path, cases: int = 1, mode: Mode = CPU, run: RunSpec = DEFAULT_RUN, called: str = "0.5.23", **verdict: Any
) -> Fuzz:
    """A search after so many equal cases, in which two known bugs were mended."""
    host = SimpleNamespace(source=SimpleNamespace(tree="", called=called, base=None), mode=mode)
    trials: Any = SimpleNamespace(host=host, run=changed(run, mode=mode))
    fuzz = Fuzz(trials, folder, Plan(seed=0, seconds=1.0, max_cases=cases, shrink_seconds=1.0, command="eagletwin fuzz"))
    entry, mended = LEDGER["25015"], (NEEDS_OVERLAP, "penalties", "min-p")
    for _ in range(cases):
        equal = Verdict(status="equal", **verdict)
        fuzz.count(CaseSeen(block=0, case=entry.case, verdict=equal, mended=mended, could_show=mended[:2]))
    return fuzz


def said(folder: Path, fuzz: Fuzz, code: int | None = None, columns: int = 2000, *, verbose: bool = False) -> str:
    return text_of(document_of(write_summary(folder, fuzz, [], code), folder), columns, verbose=verbose)


def test_a_known_bug_counts_as_mended_where_a_case_may_show_it(tmp_path: Path) -> None:
    fuzz = searched(tmp_path, 3)
    assert {bug.id: bug.mended for bug in fuzz.tally.known.values()} == {NEEDS_OVERLAP: 3, "penalties": 3}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_bug_that_needs_overlap_is_explained_in_a_search_without(overlap: bool, tmp_path: Path) -> None:
    fuzz = searched(tmp_path, mode=Mode(overlap=overlap))
    note = f"{NEEDS_OVERLAP}: of cases whose draft reads the target's rows, which run with overlap in every search."
    assert (note in said(tmp_path, fuzz, verbose=True)) == (not overlap)
    assert write_summary(tmp_path, fuzz, []).known_note == ("" if overlap else note)


def test_the_exit_code_is_said_with_what_it_means(tmp_path: Path) -> None:
    enough, none = searched(tmp_path), searched(tmp_path, 0)
    assert (exit_code(enough, []), exit_code(none, [])) == (EXIT_EQUAL, EXIT_UNKNOWN)
    text = said(tmp_path, enough, EXIT_EQUAL)
    assert f"\n  Exit code 0: nothing new was found.\n  again:  eagletwin fuzz\n  folder: {tmp_path}\n" in text
    assert "\n  Exit code 125: cannot tell: a crash" in said(tmp_path, none, EXIT_UNKNOWN)
    interrupted = said(tmp_path, enough, EXIT_INTERRUPTED)
    assert interrupted.startswith("INTERRUPTED, NOTHING NEW")
    assert "\n  Exit code 130: the search was interrupted.\n" in interrupted
    assert "Exit code" not in said(tmp_path, enough)
    write_summary(tmp_path, enough, [], EXIT_EQUAL)
    assert msgspec.json.decode((tmp_path / SUMMARY).read_bytes())["exit_code"] == EXIT_EQUAL
    assert "<p>Exit code 0: nothing new was found.</p>" in (tmp_path / NAME).read_text()


@pytest.mark.parametrize("strict", [False, True])
def test_a_search_of_a_change_that_is_not_known_says_so_on_top_and_strict_makes_it_125(strict: bool, tmp_path: Path) -> None:
    committed = searched(tmp_path, 20, run=RunSpec(strict=strict), called="0123456789")
    code = exit_code(committed, [])
    assert code == (EXIT_UNKNOWN if strict else EXIT_EQUAL)
    text = said(tmp_path, committed, code)
    assert text.splitlines()[1].strip().startswith("NOT SEEN  it is not known what 0123456789 changes"), text
    assert ("the change is not known, which --strict does not let pass" in text) == strict
    assert exit_code(searched(tmp_path, 20, run=RunSpec(strict=strict)), []) == EXIT_EQUAL  # a release


def test_progress_says_how_much_of_the_change_ran(tmp_path: Path) -> None:
    fuzz, lines = searched(tmp_path, 2), list[str]()
    fuzz.progress, fuzz._told_at = lines.append, -1e9
    fuzz.tally.changes.add(
        Differs(base="1", functions=("m.f",), ran=("m.f",), statements={"m.f": ("f.py:1", "f.py:2")}, executed=("f.py:1",))
    )
    fuzz.tally.reached = 1
    fuzz.tell()
    assert lines[0].endswith("; changed statements run: 1 of 2, in 1 case")


def test_excuses_are_counted_by_kind(tmp_path: Path) -> None:
    fuzz = searched(tmp_path, 3, excused={"tie": 2, "nudge": 1})
    assert " Excused: nudge 3, tie 6." in said(tmp_path, fuzz)
    summary: Any = summary_facts(write_summary(tmp_path, fuzz, []))
    assert summary["tally"]["excused"] == {"tie": 6, "nudge": 3}
    assert " Excused: nudge 3, tie 6." in (tmp_path / NAME).read_text()
    assert "Excused" not in said(tmp_path, searched(tmp_path))


@pytest.mark.parametrize(("gaps", "code"), [(0, EXIT_EQUAL), (2, EXIT_EQUAL), (3, EXIT_UNKNOWN)])
def test_a_search_with_many_cases_in_which_something_was_never_compared_cannot_tell(
    gaps: int, code: int, tmp_path: Path
) -> None:
    fuzz = searched(tmp_path, 20 - gaps)
    for _ in range(gaps):
        verdict = Verdict(status="unknown", vacuous=True, gap="draft.* of request a was never compared")
        fuzz.count(CaseSeen(block=0, case=LEDGER["25015"].case, verdict=verdict))
    assert exit_code(fuzz, []) == code
    text, more = said(tmp_path, fuzz, code), ", more than the 10% that may be" if code else ""
    gap = f"A stage of a request, or a family of rules, was never compared in {gaps} of them ({gaps / 20:.0%}){more}."
    assert (gap in text) == (gap in (tmp_path / NAME).read_text()) == bool(gaps)


def test_what_never_happened_is_said_with_where_it_is_explained(tmp_path: Path) -> None:
    text = said(tmp_path, searched(tmp_path), verbose=True)
    assert re.search("chunked_prefill +│ a prompt", text)


@pytest.mark.parametrize(
    ("tokens", "declared"),
    [(1, "1 token is not the one that plain decode sends"), (3, "3 tokens are not those that plain decode sends")],
)
def test_tokens_that_plain_decode_would_send_otherwise_are_a_sentence(tokens: int, declared: str, tmp_path: Path) -> None:
    fuzz = searched(tmp_path, relaxed=tokens)
    assert f" {declared}: in verify penalties do not count the tokens of the same round." in said(tmp_path, fuzz)
    assert declared in (tmp_path / NAME).read_text()


def test_a_search_that_found_nothing_fits_on_a_screen(tmp_path: Path) -> None:
    """--verbose and the page have the rest."""
    text = said(tmp_path, searched(tmp_path, 3), EXIT_EQUAL, 80)
    assert len(text.split("\n")) <= 25
    assert f"\n  Known bugs, mended in memory: {NEEDS_OVERLAP}, penalties.\n" in text
    assert "\n  Not looked at: " in text
    assert len(said(tmp_path, searched(tmp_path, 3), EXIT_EQUAL, 80, verbose=True).split("\n")) > 40


# A search none of whose engines starts: a release that has nothing of what is asked.


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


# What stays the same of a finding while its case shrinks, and what tells two findings apart.


FINISHED = Ending(kind="finished")


def diverged(**fields: object) -> Verdict:
    known: dict[str, object] = {"rule": "draft.kv", "request": "a", "round": 1, "stage": "extend", "step": 2, "iteration": 7}
    first = Divergence(**{**known, "index": "row 3", "expected": "1", "actual": "2", **fields})  # type: ignore[arg-type]
    return Verdict(status="diverged", rule=first.rule, first=first)


def crashed(detail: str, origin: str = "", where: str = "verify, iteration 3") -> tuple[Verdict, Ending]:
    ending = Ending(kind="crashed", detail=detail, where=where, **({"origin": origin} if origin else {}))
    return Verdict(status="unknown", rule="engine.crash", reason=f"{detail} (last seen: {where})"), ending


def test_request_round_step_iteration_and_values_are_no_part_of_it() -> None:
    smallest = diverged(request="c", round=0, step=0, iteration=1, index="row 0", actual="9")
    assert signature_of(diverged(), FINISHED) == signature_of(smallest, FINISHED) == Signature("draft.kv", "extend")


@pytest.mark.parametrize("other", [{"rule": "draft.slots"}, {"stage": "prefill"}, {"layer": 1}], ids=str)
def test_rule_stage_and_layer_tell_two_apart(other: dict[str, object]) -> None:
    assert signature_of(diverged(**other), FINISHED) != signature_of(diverged(), FINISHED)


def test_a_faulted_kernel_is_distinguished_by_its_name() -> None:
    first, second = (Ending(kind="faulted", rule="kernel.memory", origin=name) for name in ("assign", "scatter"))
    found = diverged(rule="kernel.memory", stage="kernel")
    assert signature_of(found, first) == Signature("kernel.memory", "kernel", kernel="assign")
    assert signature_of(found, first) != signature_of(found, second)


def test_crashes_are_distinguished_by_exception_and_function_and_by_no_number() -> None:
    one = signature_of(*crashed("IndexError: 3 (x.py:7 in f)", "IndexError in srt/x.py:f"))
    assert one == signature_of(*crashed("IndexError: 5 (x.py:9 in f)", "IndexError in srt/x.py:f", "prefill, iteration 0"))
    assert one != signature_of(*crashed("KeyError: 3 (x.py:7 in f)", "KeyError in srt/x.py:f"))
    assert one != signature_of(*crashed("IndexError: 3 (y.py:7 in g)", "IndexError in srt/y.py:g"))
    assert signature_of(*crashed("killed by SIGSEGV")) != signature_of(*crashed("killed by SIGKILL"))
    assert signature_of(*crashed("killed by SIGSEGV")) == signature_of(
        *crashed("killed by SIGSEGV", where="extend, iteration 9")
    )


def test_reasons_are_compared_without_numbers_and_names_of_requests() -> None:
    ties, more = (Verdict(status="unknown", reason=f"{number} of 20 choices are ties") for number in (7, 12))
    assert signature_of(ties, FINISHED) == signature_of(more, FINISHED)
    incomplete = Verdict(status="unknown", reason="the trace is not complete: request b has no draft in round 2")
    assert signature_of(incomplete, FINISHED) != signature_of(ties, FINISHED)
    assert without_numbers("request 'b' of [1, 22, 3], -1.5e-3 and x2") == "a request of [#], # and x2"


def test_nothing_was_found_in_an_equal_a_vacuous_and_a_stopped_run() -> None:
    stopped = Ending(kind="stopped", detail="before iteration 3")
    assert signature_of(Verdict(status="equal"), FINISHED) is None
    assert signature_of(Verdict(status="unknown", reason="never called", vacuous=True), FINISHED) is None
    assert signature_of(Verdict(status="unknown", reason="the run was stopped"), stopped) is None
    assert signature_of(diverged(), stopped) is not None


def test_a_signature_names_a_file() -> None:
    assert Signature("engine.crash", cause="IndexError in srt/x.py:f").slug == "engine.crash-IndexError-in-srt-x.py-f"
    assert str(Signature("draft.kv", "prefill", layer=2)) == "draft.kv (prefill, layer 2)"


def test_what_became_smaller_is_named_and_nothing_else() -> None:
    request = Request(id="a", prompt=(1, 2, 3), max_new_tokens=4)
    found = Case(name="x", model="llama-tiny", num_steps=3, page_size=4, chunks=(4,) * 40, requests=(request,))
    now = Case(name="x", model="llama-tiny", num_steps=3, requests=(request,))
    assert smaller(found, now) == "page_size 4 → 1, chunks 40 → 0"
    assert smaller(found, found) == ""


def test_cases_of_an_engine_are_those_that_it_runs() -> None:
    """What eagletwin.cases(engine="vllm") draws; a focus is kept."""
    mode, models = Mode(engine="vllm"), set[str]()

    @settings(max_examples=30, database=None, deadline=None, derandomize=True)
    @given(case=cases_on(engine="vllm", max_requests=2), held=cases_on(Focus(model="llama-gqa", num_steps=2), engine="vllm"))
    def drawn(case: Case, held: Case) -> None:
        assert not not_driven(case, mode)
        assert not not_driven(held, mode)
        assert held.model == "llama-gqa"
        models.add(case.model)

    drawn()
    assert len(models) > 1


def test_one_engine_runs_and_its_release_names_it() -> None:
    assert chosen_engine(None, {"sglang": "", "vllm": ""}) == (DEFAULT_ENGINE, "")
    assert chosen_engine("vllm", {"sglang": "", "vllm": ""}) == ("vllm", "")
    assert chosen_engine(None, {"sglang": "", "vllm": "0.33.0"}) == ("vllm", "0.33.0")
    with pytest.raises(InputError, match=r"--x-vllm 0\.33\.0 with --x-engine sglang: it names the engine vLLM"):
        chosen_engine("sglang", {"vllm": "0.33.0"}, "--x-")
    with pytest.raises(InputError, match="one engine runs"):
        chosen_engine(None, {"sglang": "0.5.23", "vllm": "0.33.0"})
    with pytest.raises(InputError, match="check takes one engine, and not sgl"):
        check(case_of("25015"), sgl="0.5.23")
