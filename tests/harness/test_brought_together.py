"""Things that meet by chance too seldom, and that a search brings together."""

import re

import pytest
from hypothesis import HealthCheck, given, settings

from eagletwin.cases.blocks import block_of
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.core.case import Case, Grammar
from eagletwin.harness.core.grammar import writes
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.dimensions.grammar import grammars
from eagletwin.harness.families.valid import check_case
from eagletwin.reference.sizes import reserved

from ..rows import long


def drawn(*features: str, blocks: int) -> list[Case]:
    asked = SearchOptions(only=features).asked
    return [case for number in range(blocks) for case in block_of(0, number, asked).cases()]


def fill_the_pool(case: Case) -> bool:
    """Whether its first two requests leave less than a round asks for, as long as the first one's rows are kept."""
    if len(case.requests) < 2 or case.chunks:
        return False
    first, second = case.requests[:2]
    free = case.engine.sglang.max_total_tokens - len(first.prompt) - len(second.prompt)
    round_slots = 2 * reserved(case.topk, case.most_steps, case.page_size, case.most_nodes)
    alone = all(request.arrive > 0 for request in case.requests[2:])
    return (first.arrive, second.arrive, first.max_new_tokens) == (0, 0, 1) and alone and 0 < free < round_slots


def test_beside_a_hierarchical_cache_two_requests_fill_the_pool() -> None:
    cases = drawn("host-cache", blocks=14)
    filled = [case for case in cases if fill_the_pool(case)]
    assert len(filled) > len(cases) / 10  # in many cases there is no such number of free slots
    assert {case.engine.sglang.host_policy for case in filled} >= {"write_through", "write_back"}
    for case in cases:
        check_case(case, "drawn")


def test_a_small_pool_beside_a_hierarchical_cache_holds_a_window() -> None:
    cases = drawn("mimo-v2", "host-cache", blocks=10)
    assert min(case.engine.sglang.max_total_tokens for case in cases) < 128
    for case in cases:  # SGLang starts with no smaller one
        assert case.engine.sglang.max_total_tokens > RECIPES[case.model].window + case.page_size


@pytest.mark.parametrize("model", ["qwen3-next-nextn", *long("nemotron-h-nextn")])
def test_where_states_are_cached_prompts_are_prefilled_together(model: str) -> None:
    cached = [case for case in drawn(model, blocks=40) if case.engine.sglang.radix_cache and len(case.requests) > 1]
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
