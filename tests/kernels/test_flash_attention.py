"""The stand-in for FlashAttention 3, against attention of one query and one head at a time, by the formula."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import assume, settings
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.harness.engines.inside.blame import BadArguments
from eagletwin.harness.engines.sglang.stand_ins import flash_attention
from eagletwin.harness.engines.triton_cpu import OutOfBounds


@dataclass(frozen=True)
class Attention:
    """lengths: (queries, keys) of each sequence. extra: rows of padding after the queries."""

    lengths: list[tuple[int, int]]
    groups: int
    per_group: int
    page: int
    causal: bool
    window: tuple[int, int]
    softcap: float
    latent: bool
    sinks: bool
    extra: int
    seed: int


attentions = st.builds(
    Attention,
    lengths=st.lists(st.integers(0, 5).flatmap(lambda q: st.tuples(st.just(q), st.integers(0, 9))), min_size=1, max_size=4),
    groups=st.sampled_from([1, 2]),
    per_group=st.sampled_from([1, 3]),
    page=st.sampled_from([1, 2, 4]),
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (0, 0), (2, 0), (1, 3), (-1, 1), (8, -1)]),
    softcap=st.sampled_from([0.0, 2.0]),
    latent=st.booleans(),
    sinks=st.booleans(),
    extra=st.sampled_from([0, 2]),
    seed=st.integers(0, 99),
)
WIDTH, VALUES = 4, 6  # of a key, and of a value


def numbers_of(case: Attention) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The arguments, and the keys and values of each sequence [B, K, G, D] as they lie in the pages."""
    random = torch.Generator().manual_seed(case.seed)
    heads, most = case.groups * case.per_group, max(keys for _, keys in case.lengths)
    widths = -(-most // case.page) + 1
    rows = len(case.lengths) * widths
    table = torch.randperm(rows, generator=random).view(len(case.lengths), widths).int()
    total = sum(queries for queries, _ in case.lengths) + case.extra

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    given = {
        "q": draw(total, heads, WIDTH),
        "k_cache": draw(rows, case.page, case.groups, WIDTH),
        "v_cache": draw(rows, case.page, case.groups, VALUES),
        "page_table": table,
        "cache_seqlens": torch.tensor([keys for _, keys in case.lengths], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, *accumulate(queries for queries, _ in case.lengths)], dtype=torch.int32),
        "max_seqlen_q": max(queries for queries, _ in case.lengths),
        "softmax_scale": 0.7,
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "qv": draw(total, heads, VALUES) if case.latent else None,
        "sinks": draw(heads).bfloat16() if case.sinks else None,
    }
    keys, values = (given[name][table.long()].flatten(1, 2) for name in ("k_cache", "v_cache"))
    for name in ("k_cache", "v_cache"):  # what no sequence has is not read
        unread = torch.ones(rows, case.page, dtype=torch.bool)
        for row, (_, length) in zip(table.tolist(), case.lengths, strict=True):
            for at in range(length):
                unread[row[at // case.page], at % case.page] = False
        given[name][unread] = torch.nan
    return given, keys, values


def attend_plainly(case: Attention, given: dict[str, Any], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, C] and sums [H, T], in float64, by the formula; NaN in rows that no sequence has."""
    total, heads, _ = given["q"].shape
    out, sums = torch.full((total, heads, VALUES), torch.nan).double(), torch.full((heads, total), torch.nan).double()
    at = 0
    for number, (queries, length) in enumerate(case.lengths):
        for query in range(queries):
            place = length - queries + query
            seen = [
                key
                for key in range(length)
                if (not case.causal or key <= place)
                and (case.causal or case.window[1] < 0 or key <= place + case.window[1])
                and (case.window[0] < 0 or key >= place - case.window[0])
            ]
            for head in range(heads):
                group = head // case.per_group
                scores = []
                for key in seen:
                    score = given["q"][at, head].double() @ keys[number, key, group].double()
                    if case.latent:
                        score = score + given["qv"][at, head].double() @ values[number, key, group].double()
                    score = score * 0.7
                    scores.append(case.softcap * torch.tanh(score / case.softcap) if case.softcap else score)
                sink = [given["sinks"][head].double()] if case.sinks and length else []
                whole = torch.stack([*scores, *sink]).logsumexp(0) if scores or sink else torch.tensor(-torch.inf).double()
                sums[head, at] = whole
                out[at, head] = sum(
                    (
                        (score - whole).exp() * values[number, key, group].double()
                        for key, score in zip(seen, scores, strict=True)
                    ),
                    torch.zeros(VALUES).double(),
                )
            at += 1
    return out, sums


def check(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> None:
    """float32 sums of up to ten terms of a few units each: some 1e-6 apart from float64."""
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5, equal_nan=True)


@drawn(attentions)
@settings(max_examples=150, deadline=None)
def test_attention_of_pages_is_that_of_the_formula(case: Attention) -> None:
    given, keys, values = numbers_of(case)
    right = attend_plainly(case, given, keys, values)
    check(flash_attention.flash_attn_with_kvcache(**given, return_softmax_lse=True), right)


@drawn(attentions)
@settings(max_examples=60, deadline=None)
def test_attention_of_lists_is_that_of_the_formula(case: Attention) -> None:
    assume(any(length for _, length in case.lengths))
    case = replace(case, latent=False)
    given, keys, values = numbers_of(case)
    right = attend_plainly(case, given, keys, values)
    lists = [torch.cat([part[n, :length] for n, (_, length) in enumerate(case.lengths)]) for part in (keys, values)]
    bounds = torch.tensor([0, *accumulate(length for _, length in case.lengths)], dtype=torch.int32)
    own = {name: given[name] for name in ("softmax_scale", "causal", "window_size", "softcap", "sinks", "max_seqlen_q")}
    found = flash_attention.flash_attn_varlen_func(
        given["q"], *lists, given["cu_seqlens_q"], bounds, max_seqlen_k=9, return_softmax_lse=True, **own
    )
    check(found, right)


@drawn(attentions, st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_two_parts_of_the_keys_merge_into_all_of_them(case: Attention, first: int) -> None:
    case = replace(case, causal=False, window=(-1, -1), sinks=False, page=1, extra=0)
    case = replace(case, lengths=[(queries, max(1, keys)) for queries, keys in case.lengths])
    given, keys, values = numbers_of(case)
    right = attend_plainly(case, given, keys, values)
    counts, parts = given["cache_seqlens"], []
    before = counts.clamp_max(first)
    order = torch.arange(given["page_table"].shape[1])
    later = given["page_table"].gather(1, (order + before[:, None]).clamp_max(len(order) - 1))
    for table, lengths in ((given["page_table"], before), (later, counts - before)):
        own = given | {"page_table": table, "cache_seqlens": lengths.int()}
        out, sums = flash_attention.flash_attn_with_kvcache(**own, return_softmax_lse=True)
        parts += [out, sums.T.contiguous()]
    out, sums = flash_attention.merge_state_v2(*parts)
    check((out, sums.T), right)


def tiny(**other: Any) -> dict[str, Any]:
    case = Attention([(2, 3), (2, 2)], 1, 1, 1, True, (-1, -1), 0.0, False, False, 0, 1)
    return numbers_of(case)[0] | other


REFUSED_BY_FLASH = {
    "page_table is torch.int64": {"page_table": torch.zeros(2, 4).long()},
    "cache_seqlens is torch.int64": {"cache_seqlens": torch.tensor([3, 2])},
    "2 lengths for 1 sequences": {"cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32)},
    "1 rows of pages for 2 sequences": {"page_table": torch.zeros(1, 4).int()},
    "sinks are torch.float32": {"sinks": torch.zeros(1)},
}


@pytest.mark.parametrize("words", REFUSED_BY_FLASH)
def test_what_flash_attention_refuses_is_the_engines_fault(words: str) -> None:
    with pytest.raises(BadArguments, match=words):
        flash_attention.flash_attn_with_kvcache(**tiny(**REFUSED_BY_FLASH[words]))


def test_what_the_stand_in_does_not_know_is_ours() -> None:
    with pytest.raises(NotImplementedError, match="k_descale"):
        flash_attention.flash_attn_with_kvcache(**tiny(k_descale=torch.ones(1)))


def test_columns_past_a_page_table_are_those_of_the_next_row() -> None:
    given = tiny(page_table=torch.tensor([[4, 5], [6, 7]], dtype=torch.int32), causal=False)
    given["k_cache"], given["v_cache"] = (torch.randn(8, 1, 1, width) for width in (WIDTH, VALUES))
    wide = given | {"page_table": torch.tensor([[4, 5, 6], [6, 7, 0]], dtype=torch.int32)}
    found, right = (flash_attention.flash_attn_with_kvcache(**one) for one in (given, wide))
    assert torch.equal(found, right)
    with pytest.raises(OutOfBounds, match="column 2 of a page table of 2"):  # the last row has no next one
        flash_attention.flash_attn_with_kvcache(**given | {"cache_seqlens": torch.tensor([2, 3], dtype=torch.int32)})


def test_a_page_that_the_cache_lacks_is_out_of_bounds() -> None:
    with pytest.raises(OutOfBounds, match="sequence 1, row 1: page 99 of"):
        flash_attention.flash_attn_with_kvcache(**tiny(page_table=torch.tensor([[0, 1, 2], [3, 99, 0]], dtype=torch.int32)))


def test_queries_past_the_longest_keep_unwritten_memory() -> None:
    found = flash_attention.flash_attn_with_kvcache(**tiny(max_seqlen_q=1))
    assert [bool(row.isnan().all()) for row in found] == [False, True, False, True]
