"""How prompts are read: in chunks, in pages, and beside requests that run (mixed chunks)."""

import itertools
from collections.abc import Iterator

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, expand_samples
from eagletwin.harness.families import RECIPES

from .dimension import Dimension, Refusal, of_settings


def beside_a_chunk(case: Case) -> int:
    """How many requests may run at most beside one that is read in chunks."""
    return min(len(case.requests), case.engine.sglang.max_running_requests) - 1


def _mixed_refusals(case: Case) -> Iterator[Refusal]:
    """What mixed chunks need: a draft that SGLang mixes, and budgets that leave no chunk empty.

    Each request that runs takes a token of a budget. A server's budget is always the same, and without a pipeline no chunk of
    it is empty: the batch before left a request unread, so it had a token for it, and one for each request that ran or ended
    its prompt there.
    """
    if not case.engine.sglang.mixed_chunks:
        return
    recipe = RECIPES[case.model]
    if not recipe.is_eagle:
        kind = "FROZEN_KV_MTP" if recipe.frozen else "STANDALONE"
        yield f"mixed_chunks with {case.model}: SGLang switches it off for {kind}", "leave it out"
    beside, budgets = beside_a_chunk(case), [*case.chunks, case.chunked_prefill_size]
    for number, (before, budget) in enumerate(itertools.pairwise(budgets), 1):
        if budget < before and budget <= beside:
            name = f"chunks[{number}]" if number < len(case.chunks) else "chunked_prefill_size"
            yield (
                f"mixed_chunks, and {name} is {budget}, less than the budget before: beside {beside} requests that "
                "run its chunk may be empty, and a server's budget does not fall",
                f"make it {beside + 1} at least, or as large as the one before",
            )


def _page_refusals(case: Case) -> Iterator[Refusal]:
    only = RECIPES[case.model].page
    if only and case.page_size != only:
        yield f"page_size {case.page_size} with {case.model}: SGLang's pool of its rows has pages of {only}", f"use {only}"
    budgets = [("chunked_prefill_size", case.chunked_prefill_size)]
    budgets += [(f"chunks[{number}]", chunk) for number, chunk in enumerate(case.chunks)]
    of_sglang = case.engine.vllm is None
    for name, size in (*budgets, ("max_total_tokens", case.engine.sglang.max_total_tokens)):
        if size % case.page_size and of_sglang:
            yield (
                f"{name} is {size}, not a whole number of pages of {case.page_size}",
                "SGLang wants whole pages; make it a multiple of page_size",
            )


def _tokens(case: Case) -> int:
    """All that could ever be prefilled at once, in whole pages: prompts, and what a retracted request had emitted."""
    total = sum(len(request.prompt) + request.max_new_tokens for request in expand_samples(case).requests)
    return -(-total // case.page_size) * case.page_size


def _with_pages(case: Case, *, radix_cache: bool) -> bool:
    settings = case.engine.sglang
    return settings.mixed_chunks and settings.radix_cache == radix_cache and case.page_size > 1


MIXED = of_settings(
    "mixed_chunks",
    "mixed chunks",
    key="mixed-chunks",
    kind=True,
    kinds={
        "mixed_pages": lambda case: _with_pages(case, radix_cache=False),
        "mixed_pages_cached": lambda case: _with_pages(case, radix_cache=True),
    },
    refusals=_mixed_refusals,
    argument="enable_mixed_chunk",
    happened={
        "mixed_step": (
            "a request that ran was given one token next to the prefill of another",
            lambda run: any("mixed" in record.numbers for record in run.prefills),
        )
    },
)
PAGES = Dimension(
    name="page_size",
    words="pages",
    has=lambda case: case.page_size > 1,
    size=lambda case: case.page_size,
    says=lambda case: f"page_size {case.page_size}",
    plain="page_size 1",
    without=lambda case: iter([replace(case, page_size=1)]),
    refusals=_page_refusals,
)
CHUNKS = Dimension(
    name="chunks",
    words="chunks",
    has=lambda case: bool(case.chunks) or case.chunked_prefill_size < _tokens(case),
    size=lambda case: len(case.chunks),
    says=lambda case: f"prefill in chunks ({', '.join(map(str, (*case.chunks, case.chunked_prefill_size)))})",
    plain="all prompts in one batch",
    without=lambda case: iter([replace(case, chunks=(), chunked_prefill_size=max(_tokens(case), case.chunked_prefill_size))]),
)
DIMENSIONS = (MIXED, PAGES, CHUNKS)
