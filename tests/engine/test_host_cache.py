"""The hierarchical cache: rows that the prefix cache gives up are written to the host and come back, on the real scheduler."""

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, HostPolicy, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.trace import Trace

from ..rows import long, spread
from .conftest import Runner


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple((17 * seed + 31 * i + 5 * i * seed) % 90 for i in range(count))


def case(policy: HostPolicy = "write_through", pages: int = 256, **changed: object) -> Case:
    """a is evicted for b and c, and comes back as d: the pool has room for two of them."""
    first = tokens(1, 24)
    requests = (
        Request(id="a", prompt=first, max_new_tokens=6),
        Request(id="b", prompt=tokens(2, 30), max_new_tokens=4, arrive=3),
        Request(id="c", prompt=tokens(3, 30), max_new_tokens=4, arrive=6),
        Request(id="d", prompt=(*first, 5, 6, 7), max_new_tokens=8, arrive=9),
    )
    settings = SGLangSettings(radix_cache=True, max_total_tokens=80, host_pages=pages, host_policy=policy)
    plain = Case(name="host", model="llama-tiny", num_steps=3, requests=requests, engine=EngineSettings(sglang=settings))
    return replace(plain, **changed)


# b needs the room of a at the iteration at which a begins to be written
AT_ONCE = (
    Request(id="a", prompt=tokens(1, 24), max_new_tokens=1),
    Request(id="b", prompt=tokens(2, 60), max_new_tokens=1, arrive=1),
    Request(id="c", prompt=tokens(1, 30), max_new_tokens=4, arrive=9),
)
_CONTROLLER = "sglang.srt.managers.cache_controller"
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_HOST_POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
_SUBMIT = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine.submit_host_to_device"

# Fault -> its edit, the case that shows it, and the rule that names it first.
PLANTED: dict[str, tuple[Edit, Case, str]] = {
    "the draft's rows do not come back": (
        Edit(
            target=f"{_HYBRID}._l2_load_transfers",
            match="transfers = self._l2_transfers(host_indices, device_indices, pool_transfers)",
            replacement="transfers = self._l2_transfers(host_indices, device_indices, None)",
        ),
        case(),
        "draft.kv",
    ),
    "the draft's rows are not written": (
        Edit(
            target=f"{_CONTROLLER}.HiCacheController.start_writing",
            match="self._l2_transfers(host_indices, device_indices, pool_transfers)",
            replacement="self._l2_transfers(host_indices, device_indices, None)",
        ),
        case(),
        "draft.kv",
    ),
    "the draft's rows come back to the slots of their neighbours": (
        Edit(
            target=_SUBMIT,
            match="            transfer.device_indices,",
            replacement="            transfer.device_indices if transfer is primary else transfer.device_indices.roll(1),",
        ),
        case(),
        "draft.kv",
    ),
    "the draft's rows come back one page off": (
        Edit(
            target=_SUBMIT,
            match="            transfer.host_indices,",
            replacement="            transfer.host_indices if transfer is primary else transfer.host_indices.roll(4),",
        ),
        case(page_size=4, pages=64),
        "draft.kv",
    ),
    "the target does not wait for its rows": (
        Edit(
            target=f"{_CONTROLLER}.LayerDoneCounter.wait_until",
            match="if self.consumer_index < 0:",
            replacement="if True:",
        ),
        case(),
        "target.kv",
    ),
    "rows are given up before they are written": (
        Edit(
            target=f"{_CACHE}.writing_check",
            match="if write_back:",
            replacement="if False:",
        ),
        case("write_back"),
        "target.kv",
    ),
    "rows that are being written are not locked": (
        Edit(
            target=f"{_CACHE}._execute_and_commit_kv_backup",
            match="if not write_back:",
            replacement="if False:",
        ),
        case(requests=AT_ONCE),
        "target.kv",
    ),
    "the target's rows come from another request's": (
        Edit(
            target=f"{_CACHE}._load_back_transfers",
            match="    host_indices=kv_xfer.host_indices,",
            replacement="    host_indices=kv_xfer.host_indices + 30,",
        ),
        case(),
        "target.kv",
    ),
    "slots of the host are lost when their rows are given up": (
        Edit(
            target="sglang.srt.mem_cache.unified_cache.components.full.FullComponent.free_host_values",
            match="    self.cache.host_pool_group.free(host_value, pool=PoolName.KV)",
            replacement="    pass",
        ),
        case(pages=60),
        "pool.accounting",
    ),
}


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_rows_that_come_back_are_those_that_were_given_up(run: Runner, policy: HostPolicy) -> None:
    trace, verdict = run(case(policy, exercises=("host_written", "host_restored")))
    assert verdict.status == "equal", verdict
    assert _restored(trace) == [("d", 23)]


@pytest.mark.long
def test_and_so_where_rows_were_used_twice_before_they_are_written(run: Runner) -> None:
    """write_through_selective writes what a second request goes on from."""
    first = tokens(1, 24)
    again = (Request(id=f"a{n}", prompt=(*first, n), max_new_tokens=2, arrive=4 * n) for n in range(3))
    others = (Request(id=f"b{n}", prompt=tokens(n, 30), max_new_tokens=4, arrive=4 * n) for n in (3, 4, 5))
    last = Request(id="last", prompt=(*first, 5, 6), max_new_tokens=6, arrive=24)
    twice = case("write_through_selective", requests=(*again, *others, last), exercises=("host_written", "host_restored"))
    trace, verdict = run(twice)
    assert verdict.status == "equal", verdict
    assert [request for request, _ in _restored(trace)] == ["last"]


@pytest.mark.long
def test_and_so_in_whole_pages(run: Runner) -> None:
    trace, verdict = run(case(page_size=4, pages=64, exercises=("host_written", "host_restored")))
    assert verdict.status == "equal", verdict
    assert _restored(trace) == [("d", 20)]


def test_a_host_that_is_full_gives_rows_up(run: Runner) -> None:
    _, verdict = run(case(pages=60, exercises=("host_written", "host_evicted")))
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("model", ["mimo-v2", *long("llama-eagle3", "deepseek-nextn", "gpt-oss-eagle3")])
def test_so_it_is_with_drafts_beside_the_target_and_in_its_pool_with_windows_and_latent_rows(run: Runner, model: str) -> None:
    trace, verdict = run(case(model=model, exercises=("host_written", "host_restored")))
    assert verdict.status == "equal", verdict
    assert [request for request, _ in _restored(trace)] == ["d"]


@pytest.mark.long
def test_a_request_accepts_as_much_after_its_rows_came_back_as_before(run: Runner) -> None:
    """The same request with nothing cached, with rows that came back, and after a flush."""
    asked = tokens(1, 24)
    requests = [Request(id="cold", prompt=asked, max_new_tokens=12)]
    requests += [Request(id=f"b{n}", prompt=tokens(n, 30), max_new_tokens=4, arrive=8 * n) for n in (2, 3)]
    requests += [Request(id="back", prompt=asked, max_new_tokens=12, arrive=32)]
    trace, verdict = run(case(requests=tuple(requests), exercises=("host_restored",)))
    assert verdict.status == "equal", verdict
    accepted = {
        record.request: record.numbers["correct_drafts"] for record in trace.header.records if record.stage == "finished"
    }
    rounds = {record.request: record.numbers["verify_ct"] for record in trace.header.records if record.stage == "finished"}
    assert (accepted["back"], rounds["back"]) == (accepted["cold"], rounds["cold"])
    lost, _ = run(case(requests=tuple(requests)), PLANTED["the draft's rows do not come back"][0])
    lower = {record.request: record.numbers["correct_drafts"] for record in lost.header.records if record.stage == "finished"}
    assert lower["back"] < accepted["back"]


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1]))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    edit, shown, rule = PLANTED[fault]
    trace, verdict = run(shown, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


@pytest.mark.parametrize(
    "change",
    spread(
        [
            "device_kv_buffers = device_kv_buffers[1:]",
            "host_indices = host_indices[1:]",
            "host_indices = host_indices + 10**6",
            "device_indices = device_indices - 10**6",
        ]
    ),
)
def test_what_no_copy_can_take_is_the_crash_of_who_hands_it_over(run: Runner, change: str) -> None:
    _, verdict = run(case(), _before_a_backup(change))
    assert (verdict.status, verdict.rule) == ("unknown", "engine.crash"), verdict
    assert "BadArguments" in verdict.reason


def test_a_fault_of_what_copies_itself_is_no_crash_of_the_worker(run: Runner) -> None:
    broken = "from eagletwin.harness.engines.sglang.stand_ins import late_copies; late_copies._current.clear()"
    trace, verdict = run(case(), _before_a_backup(broken))
    assert (verdict.status, verdict.rule, trace.header.ending.kind) == ("unknown", "", "unseen"), verdict
    assert "eagletwin itself failed: IndexError" in verdict.reason


def _before_a_backup(statement: str) -> Edit:
    """Run a statement before rows are copied to the host."""
    at = 'if io_backend == "kernel":'
    return Edit(target=f"{_HOST_POOL}.backup_from_device_all_layer", match=at, replacement=f"{statement}\n{at}")


def test_of_layers_in_pools_of_their_own_the_first_alone_comes_back(run: Runner) -> None:
    """Live: the rows of the second layer stay away; packed behind the target's they come back."""
    entry = LEDGER["host-layers"]
    assert entry.remedy is not None
    _, verdict = run(entry.case)
    assert (verdict.status, verdict.rule) == ("diverged", "draft.kv"), verdict
    assert verdict.first is not None
    assert (verdict.first.request, verdict.first.layer) == ("c", 1)
    _, mended = run(entry.case, *entry.remedy.edits)
    assert mended.status == "equal", mended


def _restored(trace: Trace) -> list[tuple[str, int]]:
    """(request, rows) of each load-back."""
    return [
        (record.request, len(trace.array(number, "device")))
        for number, record in enumerate(trace.header.records)
        if record.stage == "copy" and record.numbers["restore"]
    ]
