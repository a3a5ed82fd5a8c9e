"""Options of `fuzz`: two that contradict each other are refused, and every generated case has the features that are named."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from eagletwin.cases.blocks import block_of
from eagletwin.cases.strategies import MODELS, ON_REQUEST
from eagletwin.harness.cli.main import typed as entered
from eagletwin.harness.commands.fuzz import command as fuzz_command
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.unsearched import TOPICS, VALUES, has, not_looked_at
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.exits import guarded
from eagletwin.harness.core.mode import CPU, Mode
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.families.dimensions.dimension import Dimension
from eagletwin.harness.families.modes import runs_in
from eagletwin.harness.families.valid import check_case

from ..rows import long, rows

CONTRADICTIONS = [
    line.strip()
    for line in """\
    --only small-trees --only llama-mtp --only topk=2
    --only loops
    --only topk=5
    --only context-length=7
    --not updates=foo
    --findings -1
    --graphs 1,2,4
    --attention fa3
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
        "import sys\nfrom eagletwin.harness.cli.main import typed as entered\n"
        "from eagletwin.harness.core.exits import guarded\n"
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
@pytest.mark.parametrize("mode", MODES[1:])
def test_a_search_in_any_mode_that_is_narrowed_to_any_topic_has_it_in_every_block(mode: Mode) -> None:
    narrowed(mode, TOPICS)


def narrowed(mode: Mode, topics: Sequence[Dimension]) -> None:
    """The things that a block is to have come in turn, some of them not in every cycle of turns, and with a value that the mode
    does not run in some. What the mode runs in no case is what the page says is to be had without it."""
    lines = not_looked_at((), (), mode)
    asked = {topic: SearchOptions(only=(topic.key,), run=RunSpec(mode=mode)) for topic in topics}
    drawn = [topic for topic in topics if f"{topic.words} (--only {topic.key})" in lines]
    assert drawn
    for topic in drawn:
        probes = [block_of(0, number, asked[topic].asked).probe for number in range(0, 40, 16)]
        assert all(topic.has(probe) and runs_in(probe, mode) for probe in probes), topic.key
    for topic in [topic for topic in topics if topic not in drawn][:1]:  # it takes a second
        with pytest.raises(InputError, match=f"no generated case has --only {topic.key}"):
            asked[topic].check()


def test_pages_that_are_never_drawn_are_said_to_be_what_an_attention_backend_takes() -> None:
    mode = Mode(device="cuda", graphs=(1, 2), dtype="bfloat16", attention="flashmla")
    with pytest.raises(InputError, match="flashmla takes pages of 64, and no generated case has more than 16"):
        SearchOptions(run=RunSpec(mode=mode)).check()


def test_the_command_of_a_search_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every option that it writes: --not once was one that no parser knew."""
    typed: list[SearchOptions] = []
    monkeypatch.setattr(fuzz_command, "search", lambda options, **_: typed.append(options) or 0)
    options = SearchOptions(only=("trees", "topk=4,llama-gqa"), left_out=("sampling", "context-end"), minutes=2.0)
    assert guarded(lambda: entered(shlex.split(options.command)[1:])) == 0
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
    return [case for number in range(blocks) for case in block_of(options.seed, number, options.asked).cases()]


@pytest.mark.parametrize("feature", rows(CONSTANT, 6))
def test_every_generated_case_has_a_feature_of_its_engine(feature: str) -> None:
    for case in drawn(SearchOptions(only=(feature,)), 1):
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
    asked = SearchOptions(only=only, left_out=left_out).asked
    cases = [block_of(0, number, asked).probe for number in range(40)]
    assert {case.samples for case in cases} == samples
    assert {case.engine.sglang.rejection_sampling for case in cases} == rejects


def test_two_features_that_no_case_has_are_named() -> None:
    options = SearchOptions(only=("llama-tiny", "trees", "rejection"), left_out=("stream",))
    with pytest.raises(InputError, match=r"no generated case has --only trees and --only rejection\n"):
        options.check()


@pytest.mark.long
def test_a_feature_that_no_case_has_in_a_mode_is_named_with_the_mode() -> None:
    with pytest.raises(InputError, match=r"no generated case has --only plain-decode with --tp 2\n"):
        SearchOptions(only=("plain-decode",), run=RunSpec(mode=Mode(tp=2))).check()


def test_the_command_that_searches_again_has_all_that_was_typed() -> None:
    options = SearchOptions(only=("topk=2",), out=Path("a b"), run=RunSpec(kernels="checked", sglang="my tree"), minutes=1.0)
    assert options.command == "eagletwin fuzz --seed 0 --minutes 1.0 --only topk=2 --sglang 'my tree' --kernels checked"
