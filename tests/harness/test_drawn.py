"""What a search draws by default: everything, each with a share, of valid requests, and the same from the same seed."""

import itertools
import os
import re
from collections import Counter
from dataclasses import replace
from math import inf
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace as replace_struct

from eagletwin.cases.blocks import BLOCK, FEW, FEW_REQUESTS, IN_STEP, LONG, SMALL, Block, SearchConstraints, block_of
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.sample_cases import shrink
from eagletwin.cases.strategies import DRAWN, PAGE_SIZES, VALUES, Focus, cases
from eagletwin.harness.check.known import may_show
from eagletwin.harness.commands.fuzz.coverage import TOPICS, feature_filter, has, not_looked_at, topics_of
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.shrinking import cuts
from eagletwin.harness.core.case import (
    Case,
    EngineSettings,
    Grammar,
    Penalties,
    Processor,
    Request,
    Sampling,
    SGLangSettings,
    encode_case,
    expand_samples,
    processor_bias,
)
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.grammar import writes
from eagletwin.harness.core.run_spec import CPU, Mode, RunSpec
from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.dimensions.grammar import grammars
from eagletwin.harness.families.mimo_v2 import ENDING
from eagletwin.harness.families.valid import check_case, decode_case, not_driven, not_in_stages, not_on_ranks
from eagletwin.harness.judge.request_logits import first_impossible
from eagletwin.reference.sizes import reserved_slots

from ..rows import long
from . import imported

# What a search draws by default: everything, each with a share, and by itself what is added later.


@pytest.mark.parametrize("seed", [0, *long(1, 2)])
def test_every_topic_comes_in_sixty_blocks_and_every_recipe_within_six_cycles(seed: int) -> None:
    blocks_of_it = [block_of(seed, number, SearchConstraints(production=True)) for number in range(6 * 47)]
    probes = [block.probe for block in blocks_of_it]
    # a third of the blocks with grammars has the one: the test below; the other takes a core a rank, and is asked for alone
    apart = {"grammar backend", "DP attention", "sparse attention", "compressed rows"}
    assert {name for probe in probes[:60] for name in topics_of(probe)} - apart == {topic.words for topic in TOPICS} - apart
    # a thing that few recipes have may take the turn of another
    wanted = {name for name, recipe in RECIPES.items() if not family_of(recipe).asked_for}
    assert {block.focus.model for block in blocks_of_it} == wanted
    shares = Counter(probe.model for probe in probes)
    assert max(shares.values()) < len(probes) / 4
    seldom = Counter(name for probe in probes for name in topics_of(probe))
    assert min(seldom[topic.words] for topic in TOPICS if topic.words not in apart) >= len(probes) / 25


def _extras(block: Block) -> set[str]:
    """What it has of what no case has unless it is asked for."""
    of_others = ("model", "host_policy", "max_loras_per_batch", "lora_backend", "grammar_backend")
    beyond = {name: VALUES[name][count:] for name, count in DRAWN.items() if name not in of_others}
    return {*block.asks, *(name for name, values in beyond.items() if getattr(block.focus, name) in values)}


def test_most_blocks_have_several_things_at_once_and_one_that_runs_sglang_as_it_is_has_one() -> None:
    drawn = [block_of(6, number, SearchConstraints()) for number in range(120)]
    several = [frozenset(_extras(block)) for block in drawn if block.number % 2]
    assert sum(map(len, several)) / len(several) > 3
    assert len({*several}) > 0.9 * len(several)
    fewer = [len(_extras(block)) for block in drawn if not block.number % 2 and not block.as_released]
    assert 2 < sum(fewer) / len(fewer) < 4
    # with a sink comes a window, and with plain decode what it does in another way
    assert all(len(_extras(block)) <= 2 for block in drawn if block.as_released)


def test_the_probe_of_a_block_shows_what_its_cases_may_show() -> None:
    """By it known bugs are mended before a case runs: of logprobs only those of a prompt show `input-logprob-id`."""
    drawn = [block for number in range(60) if "logprobs" in (block := block_of(1, number, SearchConstraints())).asks]
    assert len(drawn) > 4
    assert all(may_show(LEDGER["input-logprob-id"], block.probe) for block in drawn)


def _simplest(block: Block) -> Case:
    """To which its first case is shrunk where every case shows it."""
    looked = block.cases()[:1]
    shrink(block.strategy, block.size, block.draw_seed, looked.__contains__, lambda case: not looked.append(case))
    return looked[-1]


@pytest.mark.long
def test_smaller_cases_may_be_without_what_a_block_has_unless_it_was_asked_for() -> None:
    names = set[str]()
    for number in range(1, 25, 2):
        block = block_of(6, number, SearchConstraints(held={"context_length": 64}))
        names |= _extras(block)
        seen = _simplest(block).engine.sglang
        plain = Focus(model=block.focus.model, context_length=64).case("plain", ()).engine.sglang
        kept = {name: getattr(seen, name) for name in ("radix_cache", "max_total_tokens", "rejection_sampling")}
        assert replace_struct(plain, random_seed=seen.random_seed, **kept) == seen, number
    assert {"deterministic", "mixed_chunks", "adaptive", "draft_window", "update_weights", "plain_decode", "threshold"} <= names


def test_a_third_of_the_blocks_with_grammars_has_the_other_backend_and_is_else_as_without_it() -> None:
    def drawn(**held: str) -> list[Block]:
        return [block_of(5, number, SearchConstraints(asks=("grammar",), held=held)) for number in range(60)]

    blocks_of_both, without = drawn(), drawn(grammar_backend="xgrammar")
    guided = [block.focus.grammar_backend == "llguidance" for block in blocks_of_both]
    assert 10 < sum(guided) < 30
    assert [replace(block.focus, grammar_backend="xgrammar") for block in blocks_of_both] == [one.focus for one in without]


@pytest.mark.parametrize("model", ["qwen3.5-nextn", "nemotron-h-nextn"])
def test_where_the_prefix_cache_keeps_states_prompts_come_to_one_and_part_there(model: str) -> None:
    drawn = [block_of(3, number, SearchConstraints(held={"model": model, "radix_cache": True})) for number in range(16)]
    drawn = [
        block for block in drawn if block.focus.context_length == 0
    ]  # near the end of a context prompts are as long as that
    grid, reach, part = RECIPES[model].tracked_every, 0, 0
    cases = [case for block in drawn for case in block.cases()]
    for case in cases:
        prompts = [request.prompt for request in case.requests]
        reach += any(len(prompt) > grid for prompt in prompts)
        part += any(one[: grid + 1] == other[: grid + 1] and one != other for one, other in itertools.combinations(prompts, 2))
    assert reach > len(cases) / 2
    assert part > len(cases) / 8


def test_with_overlap_aborts_come_inside_a_step_in_half_of_the_blocks_and_all_else_is_the_same() -> None:
    overlapping, plain = (
        [block_of(5, number, SearchConstraints(overlap=overlap)) for number in range(60)] for overlap in (True, False)
    )
    have = [IN_STEP in block.asks for block in overlapping]
    assert 20 < sum(have) < 40
    assert [replace(one, asks=tuple(ask for ask in one.asks if ask != IN_STEP)) for one in overlapping] == plain
    assert not any(IN_STEP in block.asks for block in plain)
    block = overlapping[have.index(True)]
    aborted = [event for case in block.cases() for event in case.events if event.step]
    assert aborted
    assert all(event.kind == "abort" and event.at == 0 for event in aborted)
    assert {block_of(5, number, SearchConstraints(asks=("stream",), overlap=True)).asks for number in range(9)} == {("stream",)}


def test_a_recipe_that_is_added_is_drawn_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "added", replace(RECIPES["llama-tiny"], name="added"))
    assert "added" in {block_of(0, number, SearchConstraints()).focus.model for number in range(40)}
    assert any("added" in line for line in not_looked_at((), (), CPU))


@pytest.mark.long
def test_a_search_of_several_ranks_draws_what_they_run_and_names_the_rest() -> None:
    """A block that cannot start is lost; and so is the time of whoever types an option that cannot bring it."""
    two = SearchOptions(run=RunSpec(mode=Mode(tp=2))).constraints
    drawn = [block_of(0, number, two).probe for number in range(90)]
    assert {why for probe in drawn if (why := not_on_ranks(probe, 2))} == set()
    refused = [why for number in range(90) if (why := not_on_ranks(block_of(0, number, SearchConstraints()).probe, 2))]
    assert {why.partition(" ")[2].partition(",")[0] for why in refused} == {
        "decode on several ranks: not tried",
        "that another process broadcasts",
        "has 1 KV head",
    }
    alone = {"layers that keep a state", "plain decode"}
    topics = {name for probe in drawn for name in topics_of(probe)}
    assert {topic.words for topic in TOPICS} - topics == alone | {"aborts inside a step"}
    lines = not_looked_at((), (), Mode(tp=2))
    assert {topic.words for topic in TOPICS if f"{topic.words} (--only {topic.key} without --tp)" in lines} == alone
    ours, elsewhere = (line for line in lines if line.startswith("recipes: "))
    models = {probe.model for probe in drawn}
    assert all(model in ours.partition(" (")[0].removeprefix("recipes: ").split(", ") for model in models)
    assert elsewhere.endswith("(--only qwen3-next-nextn without --tp)")
    assert len([line for line in not_looked_at((), (), CPU) if line.startswith("recipes: ")]) == 1


@pytest.mark.parametrize(
    "mode",
    [
        Mode(device="cuda", graphs=(1, 2)),
        Mode(dtype="bfloat16"),
        *long(
            Mode(device="cuda", graphs=(1, 2), dtype="bfloat16"),
            Mode(device="cuda", dtype="bfloat16", attention="flashinfer"),
        ),
    ],
)
def test_a_search_on_a_gpu_or_in_bfloat16_draws_what_runs_there_and_names_the_rest(mode: Mode) -> None:
    """What a search in this mode refuses, and names, is what no block of it has. All blocks without the mode have it."""
    asked = SearchOptions(run=RunSpec(mode=mode)).constraints
    drawn = [block_of(0, number, asked).probe for number in range(90)]
    assert {why for probe in drawn if (why := not_driven(probe, mode))} == set()
    assert {why for number in range(90) if (why := not_driven(block_of(0, number, SearchConstraints()).probe, mode))}
    lines = not_looked_at((), (), mode)
    elsewhere = {
        topic.words for topic in TOPICS if any(line.startswith(f"{topic.words} (--only {topic.key} w") for line in lines)
    }
    assert not elsewhere & {name for probe in drawn for name in topics_of(probe)}
    own = next(line for line in lines if line.startswith("recipes: ") and " with" not in line)
    named = own.partition(" (")[0].removeprefix("recipes: ").split(", ")
    assert {probe.model for probe in drawn} <= {*named}


def test_the_least_is_named_that_is_to_be_left_out_of_a_mode() -> None:
    lines = not_looked_at((), (), Mode(device="cuda", graphs=(1, 2), dtype="bfloat16", tp=2, attention="flashinfer"))
    assert "plain decode (--only plain-decode without --tp and without --device)" in lines
    prefill = not_looked_at((), (), Mode(graphs=(1, 2), prefill_graphs=(16,)))
    assert any(line.endswith("(--only deepseek-dsa without --prefill-graphs)") for line in prefill)
    last = {line.rpartition(" (--only ")[2] for line in lines if line.startswith("recipes: ")}
    assert last == {
        "llama-wide)",
        "deepseek-nextn with --graphs none)",  # within the bound its choices of experts are ties
        "llama-tiny without --attention)",
        "qwen3-moe-eagle3 without --device)",  # no graphs, and no FlashInfer
        "deepseek-dsa-wide without --attention and without --tp)",  # and those of DeepSeek-V4 and Gemma-4
        "qwen3-next-nextn without --attention and without --tp and without --dtype)",
        "deepseek-dsa without --tp and without --device)",
    }


def test_a_search_of_pipelines_says_what_they_do_not_run() -> None:
    """By the option that adds it: to the same search, or to one without a pipeline."""
    assert "pipelines (--pp 2)" in not_looked_at((), (), CPU)
    lines = not_looked_at((), (), Mode(pp=2))
    assert {"trees (--only trees)", "grammars (--only grammar without --pp)"} <= {*lines}
    assert "recipes: llama-gqa, llama-wide (--only llama-gqa)" in lines
    assert {"tensor parallelism (--tp 2 without --pp)", "overlap scheduler (--only overlap without --pp)"} <= {*lines}
    alone = {topic.words for topic in TOPICS if f"{topic.words} (--only {topic.key} without --pp)" in lines}
    drawn = [block_of(0, number, SearchConstraints(stages=2, production=True)) for number in range(300)]
    seen = {name for block in drawn if not not_in_stages(block.probe, 2) for name in topics_of(block.probe)}
    assert not seen & alone
    asked = {name for block in drawn for name in topics_of(block.probe) if not_in_stages(block.probe, 2)}
    assert alone - {"aborts inside a step", "DP attention", "sparse attention", "compressed rows"} <= asked


def test_the_cases_of_a_block_share_its_engine_and_are_the_same_whenever_they_are_drawn() -> None:
    for number in (0, 2, 5):
        block = block_of(3, number, SearchConstraints())
        drawn = block.cases()
        assert len(drawn) == (FEW if block.large else BLOCK)
        assert {case.configuration() for case in drawn} == {block.probe.configuration()}
        assert block_of(3, number, SearchConstraints()).cases() == drawn
        for case in drawn:
            check_case(case, "generated")
    assert {block_of(3, number, SearchConstraints()).size for number in range(11, 120, 12)} == {LONG, FEW}


def test_most_cases_are_small_and_pages_and_windows_have_the_prompts_that_they_need() -> None:
    drawn = [block_of(4, number, SearchConstraints()) for number in range(160)]
    large = [block for block in drawn if block.large]
    assert 4 <= len(large) < len(drawn) / 4
    assert all(block.large for block in drawn if block.focus.host_slots)
    small = [block for block in drawn if not block.large]
    needs = {
        PAGE_SIZES[-1]: [block for block in small if block.focus.page_size == PAGE_SIZES[-1]],
        ENDING: [block for block in small if 0 < RECIPES[block.focus.model].window <= ENDING],
    }
    for rows, blocks_of_it in needs.items():
        assert len(blocks_of_it) > 3
        # few sessions fit a small pool of large pages
        cases = [found for block in blocks_of_it[:12] if (found := block.cases())]
        longest = [max(len(request.prompt) for case in found for request in case.requests) for found in cases]
        assert sum(length > rows for length in longest) > len(longest) / 2
    # near the end of a context prompts are as long as that is
    plain = (block for block in small if not block.asks and not block.focus.context_length and block.sizes == SMALL)
    for block in itertools.islice(plain, 8):
        for case in block.cases():
            assert len(case.requests) <= FEW_REQUESTS
            assert all(len(request.prompt) <= SMALL.prompt for request in case.requests)
            assert all(request.max_new_tokens <= SMALL.new_tokens for request in case.requests)


def test_no_chunk_beside_requests_that_run_is_empty_and_budgets_fall_all_the_same() -> None:
    falls = 0
    for number in range(6):
        for case in block_of(3, number, SearchConstraints(wanted=feature_filter(["mixed-chunks"], []))).cases():
            check_case(case, "generated")
            falls += any(size < before for before, size in itertools.pairwise(case.chunks))
    assert falls >= 12


def test_only_and_not_narrow_a_search() -> None:
    wanted = feature_filter(["layers", "mimo-v2,step-3.5"], ["sampling"])
    for number in range(12):
        probe = block_of(0, number, SearchConstraints(wanted=wanted)).probe
        assert probe.model in ("mimo-v2", "step-3.5")
        assert not has(probe, "sampling")
    with pytest.raises(InputError, match="no feature 'loops'"):
        feature_filter(["loops"], [])


def test_sglang_as_it_is_has_a_share_of_the_small_blocks_and_not_the_first() -> None:
    blocks = [block_of(3, number, SearchConstraints()) for number in range(80)]
    in_turn = [block for block in blocks if block.number % 8 == 4]
    large = [block for block in in_turn if block.large and not block.focus.host_slots]
    assert large
    assert [block for block in blocks if block.as_released] == [block for block in in_turn if block not in large]
    cached = [block_of(7, number, SearchConstraints(held={"host_slots": 96, "radix_cache": True})) for number in range(8)]
    assert [(block.large, block.as_released) for block in cached] == [(True, number % 8 == 4) for number in range(8)]


# Things that meet by chance too seldom, and that a search brings together.


def drawn(*features: str, blocks: int) -> list[Case]:
    asked = SearchOptions(only=features).constraints
    return [case for number in range(blocks) for case in block_of(0, number, asked).cases()]


def fill_the_pool(case: Case) -> bool:
    """Whether its first two requests leave less than a round asks for, as long as the first one's rows are kept."""
    if len(case.requests) < 2 or case.chunks:
        return False
    first, second = case.requests[:2]
    free = case.engine.sglang.max_total_tokens - len(first.prompt) - len(second.prompt)
    round_slots = 2 * reserved_slots(case.topk, case.most_steps, case.page_size, case.most_nodes)
    alone = all(request.arrive > 0 for request in case.requests[2:])
    return (first.arrive, second.arrive, first.max_new_tokens) == (0, 0, 1) and alone and 0 < free < round_slots


def test_beside_a_hierarchical_cache_two_requests_fill_the_pool() -> None:
    cases = drawn("host-cache", blocks=14)
    filled = [case for case in cases if fill_the_pool(case)]
    assert len(filled) > len(cases) / 10  # in many cases there is no such number of free slots
    assert len({case.engine.sglang.host_policy for case in filled}) > 1
    for case in cases:
        check_case(case, "drawn")


def test_a_small_pool_beside_a_hierarchical_cache_holds_a_window() -> None:
    cases = drawn("mimo-v2", "host-cache", blocks=6)
    assert min(case.engine.sglang.max_total_tokens for case in cases) < 128
    for case in cases:  # SGLang starts with no smaller one
        assert case.engine.sglang.max_total_tokens > RECIPES[case.model].window + case.page_size


@pytest.mark.parametrize("model", ["qwen3-next-nextn", *long("nemotron-h-nextn")])
def test_where_states_are_cached_prompts_are_prefilled_together(model: str) -> None:
    cached = [case for case in drawn(model, blocks=16) if case.engine.sglang.radix_cache and len(case.requests) > 1]
    at_once = [case for case in cached if not case.chunks and {request.arrive for request in case.requests} == {0}]
    assert len(cached) / 5 < len(at_once) < len(cached) / 2


def test_grammars_have_alternatives_of_one_shape_whose_ends_differ() -> None:
    seen = list[Grammar]()

    @settings(max_examples=100, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(grammars())
    def look(grammar: Grammar) -> None:
        seen.append(grammar)
        assert writes(grammar)

    look()
    twins = re.compile(r"(?:^|\|)([a-d])(\([a-d|]+\)|[a-d])([a-d])\|([a-d])\2([a-d])$")
    found = [match for grammar in seen if (match := twins.search(grammar.rules[0]))]
    assert len(found) > len(seen) / 10
    assert all(match[1] != match[4] and match[3] != match[5] for match in found)


# Requests of drawn cases rarely ask for what cannot be: a processor leaves their grammar a token.


# Text -> the token with which a tokenizer writes it, which is the one that llguidance allows where a text goes on in one way.
WRITTEN = {"a": 0, "b": 1, "c": 2, "d": 3, "ab": 4, "ba": 5, "cd": 6}


def _needed(grammar: Grammar) -> list[int]:
    letters = {letter for rule in grammar.rules for letter in rule}
    return [token for text, token in WRITTEN.items() if letters.issuperset(text)]


def _drawn(backend: str, blocks: int = 16) -> list[Request]:
    """Requests with a grammar and a processor that forbids tokens."""
    asked = SearchConstraints(held={"grammar_backend": backend}, asks=("processor", "grammar"))
    requests = [one for number in range(blocks) for case in block_of(7, number, asked).cases() for one in case.requests]
    return [one for one in requests if one.grammar is not None and one.processor is not None and one.processor.kind == "forbid"]


def test_no_processor_forbids_the_one_token_that_llguidance_may_allow() -> None:
    drawn, forbidding = _drawn("llguidance"), Counter[int]()
    assert len(drawn) > 40
    for request in drawn:
        assert request.grammar is not None
        assert request.processor is not None
        more = processor_bias(request.processor, 96)
        assert not [token for token in _needed(request.grammar) if more[token] == -inf], request
        forbidding[request.processor.seed] += sum(number == -inf for number in more)
    assert len(forbidding) > 4, "they are not all the same one"
    assert all(forbidding.values()), "each forbids something"


@pytest.mark.long
def test_with_xgrammar_any_processor_is_drawn() -> None:
    """A text has some twelve tokens there, and a processor forbids a quarter of all."""
    assert {one.processor.seed for one in _drawn("xgrammar", 40) if one.processor is not None} == set(range(16))


def test_the_first_row_in_which_nothing_is_allowed() -> None:
    request = Request(id="a", prompt=(1, 2), max_new_tokens=4, processor=Processor())
    logits = np.zeros((5, 3))
    logits[3:] = -inf
    assert first_impossible(request, logits) == 3
    logits[2:4, 1] = 0.0
    assert first_impossible(request, logits) == 4
    logits[0], logits[4, 2] = -inf, 0.0
    assert first_impossible(request, logits) is None, "row 0 is the prompt's first, behind which no token is given"


# The same seed draws the same cases, whatever else Hypothesis drew in the process before.


SCRIPT = """
import sys
import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
import eagletwin.harness.commands.fuzz.search  # modules of a checkout, in whose source Hypothesis finds numbers
from eagletwin.cases.sample_cases import draw_from_seeds_alone
from eagletwin.cases.blocks import SearchConstraints, block_of
from eagletwin.cases.strategies import Focus, cases

def drawn():
    seen = [repr(case) for number in range(4) for case in block_of(7, number, SearchConstraints()).cases()]
    @hypothesis.seed(7)
    @settings(max_examples=30, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases(Focus(topk=3)))
    def look(case):
        seen.append(repr(case))
    look()
    return seen

if sys.argv[1] == "before":
    drawn()
draw_from_seeds_alone()
print("\\n".join(drawn()))
"""


@pytest.mark.slow
def test_cases_do_not_depend_on_what_was_drawn_before() -> None:
    first, second = (
        imported.run(["-c", SCRIPT, when], Path(__file__).parents[2], os.environ) for when in ("nothing", "before")
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert len(first.stdout.splitlines()) >= 20
    assert first.stdout == second.stdout


# What the scheduler is sent for a request of which several answers are wanted.


WANTED = Request(
    id="a",
    prompt=(1, 2, 3),
    max_new_tokens=4,
    min_new_tokens=2,
    arrive=5,
    stop=(7,),
    stream=True,
    sampling=Sampling(temperature=0.7),
    penalties=Penalties(presence=1.0),
    n=2,
)
CASE = Case(name="x", model="llama-tiny", num_steps=2, requests=(WANTED, Request(id="b", prompt=(9,), max_new_tokens=1)))


def test_a_request_of_no_new_tokens_comes_first_and_its_samples_are_all_that_was_asked() -> None:
    first, one, two, other = expand_samples(CASE).requests
    assert first == msgspec.structs.replace(WANTED, id="a.0", n=1, max_new_tokens=0, min_new_tokens=0, stream=False)
    assert [one, two] == [msgspec.structs.replace(WANTED, id=name, n=1, after="a.0") for name in ("a.1", "a.2")]
    assert other == CASE.requests[1]


def test_what_the_scheduler_is_sent_is_a_case_and_stays_as_it_is() -> None:
    sent = expand_samples(CASE)
    assert decode_case(encode_case(sent), "x") == sent
    assert expand_samples(sent) is sent
    assert sent.configuration() == CASE.configuration()


def test_plain_decode_is_not_asked_of_a_request_that_is_sent_nothing() -> None:
    greedy = msgspec.structs.replace(
        CASE,
        requests=(msgspec.structs.replace(WANTED, sampling=None),),
        engine=EngineSettings(sglang=SGLangSettings(plain_decode=True)),
    )
    assert expand_samples(greedy).told_plainly == ("a.1", "a.2")


def test_blocks_that_are_asked_for_samples_have_some_and_others_none() -> None:
    drawn = [case for number in range(6) for case in block_of(1, number, SearchConstraints(asks=("n",))).cases()]
    assert sum(any(request.n > 1 for request in case.requests) for case in drawn) > len(drawn) / 2
    without = [case for number in range(6) for case in block_of(1, number, SearchConstraints(asks=("stream",))).cases()]
    assert not any(request.n > 1 for case in without for request in case.requests)


def test_a_sample_may_be_aborted_inside_a_step_and_turns_of_sessions_have_none() -> None:
    aborted = [
        case for number in range(6) for case in block_of(1, number, SearchConstraints(asks=("n", "abort_in_step"))).cases()
    ]
    names = {one.id for case in aborted for one in expand_samples(case).requests if one.after}
    assert {event.request for case in aborted for event in case.events if event.step} & names
    turns = [case for number in range(6) for case in block_of(1, number, SearchConstraints(asks=("n", "session"))).cases()]
    assert any(case.sessions for case in turns)
    assert any(request.n > 1 for case in turns for request in case.requests)
    assert not any(request.n > 1 and request.session for case in turns for request in case.requests)


def test_samples_that_may_not_be_retracted_have_room() -> None:
    blocks = [block_of(1, number, SearchConstraints(asks=("n",), retract=False)) for number in range(24)]
    pools = {block.sampling is None: set[int]() for block in blocks}
    for block in blocks:
        pools[block.sampling is None].add(block.focus.max_total_tokens)
    assert pools == {True: {64, 96, 128, 512}, False: {512}}


@given(cases(asks=("n", "abort_in_step")))
@settings(max_examples=4, deadline=None)
def test_generated_samples_are_valid_and_are_taken_away_one_by_one(case: Case) -> None:
    check_case(case, "x")
    check_case(expand_samples(case), "x")
    for request in case.requests:
        if request.n > 1:
            missing = set(range(1, request.n))
            for smaller in cuts(msgspec.structs.replace(case, events=())):
                missing -= {one.n for one in smaller.requests if one == msgspec.structs.replace(request, n=one.n)}
                if not missing:
                    break
            assert not missing
