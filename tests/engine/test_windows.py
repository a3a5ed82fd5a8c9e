"""Windows that end, on the real worker: their rows, their slots, and prefix hits of requests whose older rows are gone."""

import msgspec
import numpy as np
import pytest

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .conftest import Runner

FREE = "sglang.srt.mem_cache.common.free_swa_out_of_window_slots"
ALLOCATOR = "sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator"
BACKEND = "sglang.srt.layers.attention.triton_backend"

PROMPT = (5, 17, 33, 8, 60, 41, 2, 19, 77, 50, 3, 9, 12, 25)
ANSWER = (78, 37, 83, 37, 83, 37, 83, 37, 83, 37, 83, 37, 83, 37, 83, 37, 83, 37, 83, 87, 39, 9, 46, 49)
# A conversation: the second request goes on from the first, of whose rows a window is left.
TURNS = Case(
    name="turns",
    model="mimo-v2-window",
    num_steps=3,
    requests=(
        Request(id="a", prompt=PROMPT, max_new_tokens=len(ANSWER)),
        Request(id="b", prompt=(*PROMPT, *ANSWER, 1, 2), max_new_tokens=3, arrive=14),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=256)),
    exercises=("radix_hit",),
)

PLANTED = {
    "rows of a window see one row too few": (
        Edit(
            target=f"{BACKEND}.TritonAttnBackend.forward_extend",
            match="else layer.sliding_window_size",
            replacement="else layer.sliding_window_size - 1",
        ),
        "target.hidden",
    ),
    "a slot is freed early": (
        Edit(
            target=FREE,
            match="evict_threshold = pre_len - ceil_align(",
            replacement="evict_threshold = pre_len + 1 - ceil_align(",
        ),
        "window.slots",
    ),
    "slots are freed late": (
        Edit(
            target=FREE,
            match="evict_threshold = pre_len - ceil_align(",
            replacement="evict_threshold = pre_len - 2 * ceil_align(",
        ),
        "window.slots",
    ),
    "slots are freed twice": (
        Edit(
            target=f"{ALLOCATOR}._free_swa_pages",
            match="self.swa_page_ids_group.append(swa_pages)",
            replacement="self.swa_page_ids_group += [swa_pages, swa_pages]",
        ),
        "pool.accounting",
    ),
    "what was freed is still led to": (
        Edit(
            target=f"{ALLOCATOR}._free_swa_pages_none_cuda",
            match="self.clear_full_to_swa_mapping(mapping_indices)",
            replacement="pass",
        ),
        "pool.accounting",
    ),
    "a prefix is looked up one pair too short": (
        Edit(
            target="sglang.srt.mem_cache.common.match_kv_cache",
            match="key=_req_radix_key(tree_cache, req, token_ids, max_prefix_len)",
            replacement="key=_req_radix_key(tree_cache, req, token_ids, max_prefix_len - 2)",
        ),
        "radix.hit",
    ),
}
# What left the window is read again: the slots behind those rows are freed, and lead to the one that takes padding.
READ_AGAIN = (
    Edit(
        target=f"{BACKEND}.update_sliding_window_buffer",
        match="torch.tensor(sliding_window_size)",
        replacement="torch.tensor(sliding_window_size + 4)",
    ),
    Edit(
        target=f"{BACKEND}.TritonAttnBackend.forward_extend",
        match="else layer.sliding_window_size",
        replacement="else layer.sliding_window_size + 4",
    ),
)
POOL = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"
OF_DRAFT = "if all(of_window for _, of_window in self.layers_mapping.values()):\n    "


def _stored(line: str, of: str = "") -> tuple[Edit, ...]:
    """Before a row of a window is stored."""
    return (Edit(target=f"{POOL}.set_kv_buffer", match="loc = swa_loc", replacement=f"loc = swa_loc\n{of}{line}"),)


def _width(more: str) -> tuple[Edit, ...]:
    buffer, backend = f"{BACKEND}.update_sliding_window_buffer", f"{BACKEND}.TritonAttnBackend.forward_extend"
    size, layer = "torch.tensor(sliding_window_size", "else layer.sliding_window_size"
    return (
        Edit(target=buffer, match=f"{size})", replacement=f"{size}{more})"),
        Edit(target=backend, match=layer, replacement=f"{layer}{more}"),
    )


WIDER, NARROWER = _width(" + 1"), _width(" - 1")
NEXT_SLOT, OTHER_HALF = "loc = loc.roll(1)", "cache_k = cache_k.roll(cache_k.shape[-1] // 2, -1)"
HALF = "cache_v = torch.nn.functional.pad(cache_v[..., ::2], (0, cache_v.shape[-1] // 2))"
TURNED = "sglang.srt.models.mimo_v2.MiMoV2Attention.forward"
# One of each kind of mistake in the rows of windows: model, edits, rule.
OF_ROWS = {
    "a window is a row too wide": ("mimo-v2-window", WIDER, "target.hidden"),
    "a window is a row too narrow, with sinks": ("gpt-oss-eagle3", NARROWER, "target.kv"),
    "a slot is freed early, with sinks": ("gpt-oss-eagle3", (PLANTED["a slot is freed early"][0],), "window.slots"),
    "slots are freed late, with sinks": ("gpt-oss-eagle3", (PLANTED["slots are freed late"][0],), "window.slots"),
    "a row is stored in the slot beside its own": ("gpt-oss-eagle3", _stored(NEXT_SLOT), "target.kv"),
    "a draft's row is stored in the slot beside its own": ("mimo-v2-window", _stored(NEXT_SLOT, OF_DRAFT), "draft.kv"),
    "half of a row's value is stored": ("gpt-oss-eagle3", _stored(HALF), "target.kv"),
    "half of a draft's row's value is stored": ("mimo-v2-window", _stored(HALF, OF_DRAFT), "draft.kv"),
    "the halves of a draft's row's key are exchanged": ("mimo-v2-window", _stored(OTHER_HALF, OF_DRAFT), "draft.kv"),
    "rows of a window stand one position further": (
        "mimo-v2-window",
        (
            Edit(
                target=TURNED,
                match="self.rotary_emb(positions, q, k)",
                replacement="self.rotary_emb(positions + (self.attn.sliding_window_size > 0), q, k)",
            ),
        ),
        "target.kv",
    ),
}


@pytest.fixture(scope="module")
def turns(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return host.engine(TURNS).run(TURNS, tmp_path_factory.mktemp("turns"))


def test_a_conversation_is_equal_and_goes_on_from_what_a_window_sees(turns: Trace) -> None:
    verdict = judge(turns)
    assert verdict.status == "equal", verdict
    for rule in ("window.slots", "radix.hit", "pool.accounting", "draft.kv", "target.kv"):
        assert verdict.checked[rule] > 0
    hit = next(record for record in turns.header.records if record.stage == "prefill" and record.request == "b")
    assert hit.numbers["start"] == len(PROMPT) + len(ANSWER) - 1  # keys are pairs of tokens
    batch = next(n for n, r in enumerate(turns.header.records) if r.stage == "batch" and r.iteration == hit.iteration)
    live = np.flatnonzero(turns.array(batch, "window_cached"))
    assert len(live) < len(turns.array(batch, "window_cached")) / 2
    assert set(range(hit.numbers["start"] - 8, hit.numbers["start"])) <= set(live.tolist())


@pytest.mark.parametrize("fault", spread(PLANTED, lambda fault: PLANTED[fault][-1].partition(".")[0]))
def test_a_fault_of_windows_is_named(run: Runner, fault: str) -> None:
    edit, rule = PLANTED[fault]
    _, verdict = run(TURNS, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


@pytest.mark.parametrize("fault", spread(OF_ROWS, lambda fault: OF_ROWS[fault][0]))
def test_a_fault_in_rows_of_windows_is_named(run: Runner, fault: str) -> None:
    model, edits, rule = OF_ROWS[fault]
    _, verdict = run(msgspec.structs.replace(TURNS, model=model, exercises=()), *edits)
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


def test_a_slot_that_is_read_after_it_left_the_window_shows(run: Runner) -> None:
    _, verdict = run(TURNS, *READ_AGAIN)
    assert (verdict.status, verdict.rule) == ("diverged", "target.hidden"), verdict


def test_a_row_that_left_the_window_may_come_back_as_that_of_another_request(run: Runner) -> None:
    """Row 0 of request b leaves the window and is freed. Request a begins with the same two tokens: the prefix cache has b's
    slot lead to a's row. Upper layers were fed a draft of a's there, and this is what b has now."""
    case = msgspec.structs.replace(
        TURNS,
        requests=(
            Request(id="a", prompt=(49, 53), max_new_tokens=1, arrive=7),
            Request(id="b", prompt=(49, 53, 49, 53, 5, 33, 65, 62, 51, 38, 61), max_new_tokens=16),
        ),
        events=(Event(at=8, kind="retract"),),
        exercises=("retraction_in_decode",),
    )
    trace, verdict = run(case)
    assert verdict.status == "equal", verdict
    led = [
        trace.integers(n, "window_table")[0]
        for n, record in enumerate(trace.header.records)
        if record.request == "b" and "window_table" in record.tensors
    ]
    assert 0 in led
    assert led[-1] not in (0, led[0])


def _none(rows: Array, at: int) -> Array:
    changed = rows.copy()
    changed[at] = 0
    return changed


def _same(rows: Array, at: int) -> Array:
    changed = rows.copy()
    changed[at] = changed[at - 1]
    return changed


@pytest.mark.parametrize("change", [_none, _same])
def test_each_row_that_a_window_sees_has_a_slot_alone(turns: Trace, change: object) -> None:
    """Of a batch of request a alone: the row before the next."""
    assert callable(change)
    number = max(n for n, r in enumerate(turns.header.records) if r.stage == "batch" and r.iteration < 10)
    next_row = next(r for r in turns.header.records[number:] if r.stage == "draft").numbers["seq_len"]
    tensors = {**turns.tensors, f"{number}.window_slots": change(turns.array(number, "window_slots"), next_row - 1)}
    verdict = judge(Trace(turns.header, tensors))
    assert (verdict.status, verdict.rule) == ("diverged", "window.slots"), verdict


@pytest.mark.parametrize("kind", ["window_free", "window_held", "window_cached"])
def test_slots_of_windows_have_one_owner_each(turns: Trace, kind: str) -> None:
    number = next(
        n
        for n, r in enumerate(turns.header.records)
        if r.stage == "iteration" and all(len(turns.array(n, f"window_{name}")) for name in ("free", "held", "cached"))
    )
    tensors = {**turns.tensors, f"{number}.{kind}": turns.array(number, kind)[1:]}
    verdict = judge(Trace(turns.header, tensors))
    assert (verdict.status, verdict.rule) == ("diverged", "pool.accounting"), verdict
