"""Options of `fuzz`: two that contradict each other are refused, and every generated case has what the others ask for."""

import itertools
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from eagletwin.cases.blocks import block_of
from eagletwin.cases.strategies import MODELS, ON_REQUEST, TOPKS
from eagletwin.harness.cli.main import typed as entered
from eagletwin.harness.commands.fuzz import command as fuzz_command
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.unsearched import TOPICS, not_looked_at
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.exits import guarded
from eagletwin.harness.core.mode import CPU, Mode
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.families.modes import runs_in
from eagletwin.harness.families.valid import check_case

from .rows import rows

CONTRADICTIONS = [
    line.strip()
    for line in """\
    --sampling rejection --topk 4
    --sampling rejection --model llama-eagle3
    --sampling rejection --model llama-standalone
    --sampling rejection --small-trees
    --ask min_p --sampling none
    --ask beam_search
    --small-trees --topk 1
    --small-trees --model mimo-v2
    --small-trees --model llama-mtp --topk 2
    --update-weights disk --model llama-eagle3
    --update-weights tensor --model llama-eagle3-full
    --update-weights disk --model llama-mtp
    --update-weights foo
    --view true_tree --topk 1
    --view true_tree --sampling rejection
    --only loops
    --not trees --not chains
    --only rejection --model llama-eagle3
    --view committed --model llama-tiny
    --context-length 0
    --context-length 7
    --topk 5
    --model deepseek
    --graphs 1,2
    --graphs 1,2,4
    --attention fa3
    --kernels shadow --dtype bfloat16
    --kernels interpreter --dtype bfloat16
    --tp 3
    --without draft.magic""".splitlines()
]


def test_options_that_contradict_each_other_are_refused_before_anything_slow_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom eagletwin.harness.cli.main import typed as entered\n"
        "from eagletwin.harness.core.exits import guarded\n"
        f"for typed in {CONTRADICTIONS}:\n"
        "    code = guarded(lambda: entered(['fuzz', *typed.split()]))\n"
        "    print(code, 'torch' in sys.modules, 'eagletwin.harness.engines.host' in sys.modules, typed)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"128 False False {typed}" for typed in CONTRADICTIONS]
    assert done.stderr.count("\n  try: ") == len(CONTRADICTIONS)
    assert "use one of ," not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "mode",
    rows(
        [
            *(CPU, Mode(overlap=True), Mode(tp=2), Mode(pp=2), Mode(dtype="bfloat16"), Mode(device="cuda", graphs=(1, 2))),
            Mode(device="cuda", graphs=(1, 2), dtype="bfloat16", attention="flashinfer"),
        ]
    ),
)
def test_a_search_that_is_narrowed_to_a_topic_has_it_in_every_block(mode: Mode) -> None:
    """The things that a block is to have come in turn, some of them not in every cycle of turns, and with a value that the mode
    does not run in some. What the mode runs in no case is what the page says is to be had without it."""
    lines = not_looked_at((), (), mode)
    asked = {topic: SearchOptions(only=(topic.key,), run=RunSpec(mode=mode)) for topic in TOPICS}
    drawn = [topic for topic in TOPICS if f"{topic.name} (--only {topic.key})" in lines]
    for topic in drawn:
        probes = [block_of(0, number, asked[topic].asked).probe for number in range(0, 40, 16)]
        assert all(topic.has(probe) and runs_in(probe, mode) for probe in probes), topic.key
    for topic in [topic for topic in TOPICS if topic not in drawn][:1]:  # it takes a second
        with pytest.raises(InputError, match="no generated case has all that was asked for"):
            asked[topic].check()


def test_pages_that_are_never_drawn_are_said_to_be_what_an_attention_backend_takes() -> None:
    mode = Mode(device="cuda", graphs=(1, 2), dtype="bfloat16", attention="flashmla")
    with pytest.raises(InputError, match="flashmla takes pages of 64, and no generated case has more than 16"):
        SearchOptions(run=RunSpec(mode=mode)).check()


def test_the_command_of_a_search_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every option that it writes: --not once was one that no parser knew."""
    typed: list[SearchOptions] = []
    monkeypatch.setattr(fuzz_command, "search", lambda options, **_: typed.append(options) or 0)
    options = SearchOptions(only=("trees", "llama-gqa"), left_out=("sampling", "context-end"), asks=("stream",), minutes=2.0)
    assert guarded(lambda: entered(shlex.split(options.command)[1:])) == 0
    [again] = typed
    assert (again.only, again.left_out, again.asks) == (options.only, options.left_out, options.asks)
    assert again.command == options.command


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example, HealthCheck.filter_too_much]
ASKED: dict[str, tuple[Any, ...]] = {
    "model": (None, *MODELS, *ON_REQUEST),
    "topk": (None, *TOPKS),
    "context_length": (None, 8, 16, 32, 64),
    "small_trees": (False, True),
    "update_weights": (None, "disk", "tensor", "tensor_bucket", "distributed", "distributed_bucket"),
    "sampling": (None, "none", "target", "rejection", "any"),
    "asks": (
        (),
        ("stream", "logit_bias", "processor", "penalties", "min_new_tokens"),
        ("stream", "grammar"),
        ("stream", "min_p", "logprobs", "hidden_states"),
    ),
}


def allowed(**asked: Any) -> SearchOptions | None:
    options = SearchOptions(**asked)
    try:
        options.check()
    except InputError:
        return None
    return options


SINGLE = [{name: value} for name, values in ASKED.items() for value in values[1:]]


def pairs() -> list[dict[str, Any]]:
    """Each two options that are not of models; and each model with each other option, whose values take turns."""
    others = [one for one in SINGLE if "model" not in one]
    found = [one | other for one, other in itertools.combinations(others, 2) if one.keys() != other.keys()]
    for number, model in enumerate(ASKED["model"][1:]):
        for name, values in ASKED.items():
            if name != "model":
                turn = [
                    {"model": model, name: value} for value in values[1:] if allowed(model=model, **{name: value}) is not None
                ]
                found += turn[number % len(turn) :][:1] if turn else []
    return [asked for asked in found if allowed(**asked) is not None]


PAIRS = pairs()


def drawn(options: SearchOptions, blocks: int) -> list[Case]:
    return [case for number in range(blocks) for case in block_of(options.seed, number, options.asked).cases()]


@pytest.mark.parametrize("asked", rows(SINGLE, 6), ids=str)
def test_every_generated_case_has_what_a_single_option_asks_for(asked: dict[str, Any]) -> None:
    options = allowed(**asked)
    assert options is not None
    for case in drawn(options, 8):
        assert options.unmet(case) == ""
        check_case(case, "generated")


@pytest.mark.slow
def test_every_generated_case_has_what_two_options_ask_for() -> None:
    assert len(PAIRS) > 150
    for asked in PAIRS[::3]:
        options = allowed(**asked)
        assert options is not None
        block = block_of(options.seed, 0, options.asked)
        for case in block.cases(block.size // 2):  # there are hundreds of such blocks
            assert options.unmet(case) == "", asked
            check_case(case, "generated")


@pytest.mark.slow
@settings(deadline=None, max_examples=40, suppress_health_check=QUIET)
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in ASKED.items()}), st.integers(0, 63), st.data())
def test_whatever_is_asked_for_is_refused_or_held(asked: dict[str, Any], number: int, data: st.DataObject) -> None:
    options = allowed(**asked)
    assume(options is not None)
    assert options is not None
    case = data.draw(block_of(0, number, options.asked).strategy)
    assert options.unmet(case) == ""
    check_case(case, "generated")


def test_what_a_case_lacks_is_named() -> None:
    [case, *_] = drawn(SearchOptions(topk=1, sampling="none"), 1)
    assert SearchOptions(topk=2).unmet(case) == "--topk 2"
    assert SearchOptions(small_trees=True).unmet(case) == "--small-trees"
    assert SearchOptions(sampling="any").unmet(case) == "--sampling any"


def test_the_command_that_searches_again_has_all_that_was_typed() -> None:
    options = SearchOptions(
        topk=2, small_trees=True, out=Path("a b"), run=RunSpec(kernels="checked", sglang="my tree"), minutes=1.0
    )
    assert options.command == (
        "eagletwin fuzz --seed 0 --topk 2 --minutes 1.0 --small-trees --sglang 'my tree' --kernels checked"
    )
