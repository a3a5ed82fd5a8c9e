"""Engine processes: forked, joined, idle, with stubs that raise, and the same bytes from each of them."""

import contextlib
import importlib.util
import socket
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from msgspec.structs import replace

from eagletwin.cases.blocks import SearchConstraints, block_of
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.strategies import Focus
from eagletwin.harness.core.case import Adaptive, Case, EngineSettings, Request, SGLangSettings, Tier
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import EngineInfo
from eagletwin.harness.core.run_spec import CPU
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines import protocol, start
from eagletwin.harness.engines.host import EngineProcess, Host, PatchDoesNotApply, WouldNotStart
from eagletwin.harness.engines.sglang.compat import state_layers
from eagletwin.harness.engines.sglang.stand_ins import stubs
from eagletwin.harness.engines.sglang.stand_ins.late_copies import CopyEvent, CopyStream, stream, transfer_kv_direct
from eagletwin.harness.engines.source import INSTALLED, Source
from eagletwin.harness.engines.start import Zygote
from eagletwin.harness.judge.judge import judge

from ..lab.bench.speed import rate_case
from ..rows import spread
from .older import host_of

# An engine with further patches, forked from one that stands: the same as one that is built with them, or none.


def engines(host: Host, name: str) -> tuple[Case, EngineProcess, EngineProcess]:
    """An entry's case, an engine of SGLang as it is, and one with the entry's remedy, which was foreseen."""
    case, remedy = replace(LEDGER[name].case, exercises=(), name=f"forked-{name}"), LEDGER[name].remedy
    assert remedy is not None
    released = host.engine(case, foreseen=(remedy,))
    return case, released, host.engine(case, (remedy,))


def trace(engine: EngineProcess, case: Case, folder: Path) -> bytes:
    folder.mkdir()
    engine.run(case, folder)
    return (folder / "trace.safetensors").read_bytes()


@pytest.fixture
def hosts() -> object:
    """Two of their own: in that of other tests an engine may stand that was built otherwise."""
    with Host() as one, Host() as other:
        yield one, other


def test_a_forked_engine_runs_a_case_as_one_that_was_built(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    for name in ("multi-layer-chunk-tail-2",):
        case, released, forked = engines(hosts[0], name)
        remedy = LEDGER[name].remedy
        assert remedy is not None
        built = hosts[1].engine(case, (remedy,))
        assert (released.origin, forked.origin, built.origin) == (None, released, None)
        assert forked.info == built.info
        mended = trace(forked, case, tmp_path / f"{name}-forked")
        assert mended == trace(built, case, tmp_path / f"{name}-built")
        assert mended != trace(released, case, tmp_path / f"{name}-released")  # and that is as it was


@pytest.mark.parametrize("name", spread(["standalone-shift", "indices-overflow", "draft-window"]))
def test_what_a_patch_changes_in_a_build_is_built(host: Host, name: str) -> None:
    _, _, engine = engines(host, name)
    assert engine.origin is None


def test_what_was_not_foreseen_is_built(host: Host) -> None:
    case = replace(LEDGER["certain-node"].case, exercises=(), page_size=4)
    host.engine(case)
    assert host.engine(case, (LEDGER["certain-node"].remedy,)).origin is None


def test_a_patch_that_does_not_fit_is_refused_as_ever(host: Host) -> None:
    case, remedy = replace(LEDGER["certain-node"].case, exercises=(), page_size=16), LEDGER["certain-node"].remedy
    assert remedy is not None
    unfit = Patch(name="unfit", edits=(Edit(target=remedy.edits[0].target, match="no such text", replacement=""),))
    host.engine(case, foreseen=(remedy,))
    with pytest.raises(PatchDoesNotApply, match="occurs 0 times"):
        host.engine(case, (unfit,))


ENDS = {
    "os.kill(os.getpid(), 11)": r"was killed by SIGSEGV while it was built\n.*\n.*; where it stood:\n    Fatal Python error: "
    r"Segmentation fault(.|\n)*scheduler.Scheduler.init_model_worker, patched>\", line 2",
    "os.kill(os.getpid(), 9)": r"was killed by SIGKILL while it was built\n.*\n  try: free some memory.*doctor`$",
    "os._exit(3)": r"ended with exit status 3 while it was built",
}


@pytest.mark.parametrize("how", spread(ENDS))
def test_an_engine_that_dies_while_it_is_built_says_how(host: Host, busy_case: Case, how: str) -> None:
    first = "def init_model_worker(self):\n"
    edit = Edit(
        target="sglang.srt.managers.scheduler.Scheduler.init_model_worker",
        match=first,
        replacement=f"{first}    import os; {how}\n",
    )
    with pytest.raises(WouldNotStart, match=ENDS[how]):
        host.engine(busy_case, (Patch(name="p", edits=(edit,)),))
    assert host.engine(busy_case).alive


@pytest.mark.long
def test_a_forked_engine_ends_with_the_one_it_comes_from_and_comes_again(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    case, released, forked = engines(hosts[0], "certain-node")
    before = trace(forked, case, tmp_path / "before")
    released.close()
    assert not forked.alive
    _, released, again = engines(hosts[0], "certain-node")
    assert again.origin is released
    assert again is not forked
    assert trace(again, case, tmp_path / "after") == before


# Zygotes of one process are forked from one ancestor, and none outlives it.


def ancestors() -> list[psutil.Process]:
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if any(word.endswith("processes.ancestor") for word in child.cmdline())]


@pytest.mark.long
def test_what_every_sglang_imports_of_others_is_imported_once(host: Host) -> None:
    host.connection()
    before = ancestors()
    zygotes = [zygote for one in before for zygote in one.children()]
    with Host() as other:
        other.connection()
        assert ancestors() == before
        [zygote] = {zygote for one in before for zygote in one.children()} - {*zygotes}
    assert not zygote.is_running()


@pytest.mark.long
@pytest.mark.slow
def test_a_zygote_ends_with_its_ancestor_and_the_next_case_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_standing", None)
    others, case = ancestors(), LEDGER["25015"].case
    with Host() as host:
        host.engine(case)
        [own] = (one for one in ancestors() if one not in others)
        [zygote] = own.children()
        own.kill()
        zygote.wait()
        assert host._zygote is not None
        host._zygote._process.wait()
        assert host._zygote.ended
        assert judge(host.engine(case).run(case, tmp_path)).status == "equal"
        assert start._standing is not None
    start._standing.connection.close()


def test_an_sglang_with_packages_of_its_own_is_no_fork_of_it(tmp_path: Path) -> None:
    """A release's pinned transformers, and a tree beside which another package lies."""
    tree, pinned = tmp_path / "tree", tmp_path / "pinned"
    for package in (tree / "sglang", pinned / "transformers"):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (tree / "sglang-1.dist-info").mkdir()
    assert start.may_fork(Source())
    assert start.may_fork(Source("tree", (tree,)))
    assert not start.may_fork(Source("tree", (tree, pinned)))
    (tree / "orjson.py").touch()
    assert not start.may_fork(Source("tree", (tree,)))


def test_with_other_packages_by_pythonpath_none_is_forked(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.connection()
    assert start.may_fork(Source())
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert not start.may_fork(Source())


@pytest.mark.long
@pytest.mark.slow
def test_a_release_runs_with_the_transformers_that_it_pins(host: Host) -> None:
    host.connection()
    with host_of("0.5.12") as other:
        [_, layer] = other.source.paths
        assert layer.name == f"transformers-{other.engine(LEDGER['25015'].case).info.transformers}"


# An engine of one rank costs nearly nothing while it waits.


# torch's name of the thread that each of its gloo devices has, which wakes up a hundred times a second.
LISTENS = "gloo_tcp_loop"


def listening(process: psutil.Process) -> int:
    """0 of one that has ended."""
    names = []
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        names = [Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text() for thread in process.threads()]
    return names.count(f"{LISTENS}\n")


def test_the_groups_of_one_rank_share_the_thread_that_listens(host: Host, busy_case: Case) -> None:
    before = psutil.Process().children(recursive=True)
    host.engine(replace(busy_case, num_steps=2, page_size=2))
    engines = [process for process in psutil.Process().children(recursive=True) if process not in before]
    assert {listening(engine) for engine in engines} - {0} == {1}  # 0: of what imports SGLang, if it just has


# Several processes have their engines from one that has imported SGLang (wire.Join).


CASE = Case(name="joined", model="llama-tiny", requests=(Request(id="a", prompt=(7, 3), max_new_tokens=3),), num_steps=1)

_ADAPTIVE = EngineSettings(sglang=SGLangSettings(adaptive=Adaptive(tiers=(Tier(batch=1, steps=(1, 2)),))))


def _joined(host: Host) -> Host:
    connection = host.shared()
    assert connection is not None
    return Host(Zygote.joined(connection.detach(), INSTALLED, CPU))


def test_who_joins_has_engines_of_its_own_and_leaves_those_of_others_alone(host: Host, tmp_path: Path) -> None:
    for name in ("first", "theirs", "again"):
        (tmp_path / name).mkdir()
    first = host.engine(CASE).run(CASE, tmp_path / "first")
    with _joined(host) as joined, _joined(host) as other:
        assert joined.engine(CASE) is not host.engine(CASE)
        theirs = joined.engine(CASE).run(CASE, tmp_path / "theirs")
        assert theirs.header.tensors_sha256 == first.header.tensors_sha256
        assert (joined.version, other.version) == (host.version, "")
        other.connection()
        assert other.version == host.version
        joined.close()
        assert other.engine(CASE).alive
    assert host.engine(CASE).run(CASE, tmp_path / "again").header.tensors_sha256 == first.header.tensors_sha256


def test_what_its_engines_write_is_apart_from_what_others_have_written(host: Host, tmp_path: Path) -> None:
    """An engine that was built removes what SGLang left in its folder, while those of others stand and run."""
    host.connection()
    assert host._zygote is not None
    scratch, case = host._zygote.scratch, replace(CASE, engine=_ADAPTIVE)
    others = scratch / "tmp-of-another"
    others.touch()
    before = {path.name for path in scratch.iterdir()}
    with _joined(host) as joined:
        joined.engine(case).run(case, tmp_path)
        assert others.exists()
        [own] = [path for path in scratch.iterdir() if path.name not in before]
        assert [path.name.partition("-")[0] for path in own.iterdir()] == ["adaptive"]
    with _joined(host) as last:
        last.engine(CASE)  # it is built when the first was seen to have left
        assert not own.exists()
    others.unlink()


def test_one_that_was_joined_and_ended_is_seen_to_have_ended() -> None:
    ours, theirs = socket.socketpair()
    with Zygote.joined(ours.detach(), INSTALLED, CPU) as zygote, Host(zygote) as host:
        protocol.send(theirs, protocol.Ready("any"))
        assert host.connection() is zygote.connection
        assert not zygote.ended
        theirs.close()
        assert zygote.ended


def test_one_that_ends_before_it_is_ready_cannot_be_joined() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with Host(Zygote.joined(ours.detach(), INSTALLED, CPU)) as host, pytest.raises(WouldNotStart, match="ended or fell silent"):
        host.connection()


# The same case gives the same bytes: in one engine, after other cases, and in two interpreters that share nothing.


PARTS = ("trace.json", "trace.safetensors")


def test_two_fresh_interpreters_give_byte_identical_traces(host: Host, busy_case: Case, tmp_path: Path) -> None:
    for name in ("here", "again", "there", "other"):
        (tmp_path / name).mkdir()
    other_family = block_of(0, 0, SearchConstraints(held={"model": "qwen3.5-nextn"}, sampling="")).probe
    host.engine(other_family).run(other_family, tmp_path / "other")  # an early import of its models fails
    host.engine(busy_case).run(busy_case, tmp_path / "here")
    host.engine(busy_case).run(busy_case, tmp_path / "again")
    with Host() as other:
        other.engine(busy_case).run(busy_case, tmp_path / "there")
    for part in PARTS:
        first = (tmp_path / "here" / part).read_bytes()
        assert first == (tmp_path / "again" / part).read_bytes()
        assert first == (tmp_path / "there" / part).read_bytes()


@pytest.mark.long
def test_a_case_gives_the_same_after_nineteen_others(host: Host, busy_case: Case, tmp_path: Path) -> None:
    engine = host.engine(busy_case)
    alone, after = tmp_path / "alone", tmp_path / "after"
    alone.mkdir()
    engine.run(busy_case, alone)
    for number in range(19):
        (tmp_path / str(number)).mkdir()
        other = msgspec.structs.replace(busy_case, name="other", requests=rate_case(number).requests)
        engine.run(other, tmp_path / str(number), fresh=number == 0)
    after.mkdir()
    assert engine.run(busy_case, after, fresh=False).header.before == 19
    assert (alone / "trace.safetensors").read_bytes() == (after / "trace.safetensors").read_bytes()


# Streams whose copies wait for whoever waits for them.


def _copies(target: torch.Tensor) -> tuple[CopyStream, list[CopyEvent]]:
    """Two copies in one stream, of rows 0 and 1, with an event behind each."""
    own, events, source = CopyStream(), [], torch.ones(4, 1)
    with stream(own):
        for row in (0, 1):
            transfer_kv_direct([source], [target], torch.tensor([row]), torch.tensor([row]), 1)
            events.append(own.record_event())
    return own, events


def test_who_asks_about_an_event_hurries_no_copy_behind_it() -> None:
    target = torch.zeros(4, 1)
    _, (first, second) = _copies(target)
    assert not first.query()
    assert first.query()
    assert target.flatten().tolist() == [1, 0, 0, 0]
    assert first.query()
    assert target.flatten().tolist() == [1, 0, 0, 0]
    second.synchronize()
    assert target.flatten().tolist() == [1, 1, 0, 0]


def test_a_stream_waits_for_the_place_that_an_event_had_when_it_was_told_to() -> None:
    target = torch.zeros(4, 1)
    own, (first, _) = _copies(target)
    other = CopyStream()
    first.wait(other)
    own.record_event(first)  # anew, behind both
    other.synchronize()
    assert target.flatten().tolist() == [1, 0, 0, 0]


# Each module that is stubbed to save time raises by name, and each trace lists them all.


# A model of transformers, of which none is named
NAMES = (*stubs.IDLE, "transformers.models.llama.modeling_llama")


def search_path(name: str) -> list[str] | None:
    """Where the parent of a module looks for it; found without importing SGLang in this process."""
    top, *middle = name.split(".")[:-1] or [""]
    spec = importlib.util.find_spec(top) if top else None
    return [str(Path(folder, *middle)) for folder in spec.submodule_search_locations or ()] if spec is not None else None


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_anything_in_it_raises_by_name(name: str) -> None:
    spec = stubs.StubFinder().find_spec(name, search_path(name))
    assert spec is not None, f"{name} does not exist any more: take it from the list"
    module = importlib.util.module_from_spec(spec)
    for call in (module.function, module.Class.method):
        with pytest.raises(stubs.StubCalled, match=rf"^{name}\.\w+(\.method)? was called at .*test_engine_processes\.py:"):
            call(1)


def test_a_trace_lists_them_whatever_its_process_has_served_before(busy_trace: Trace, host: Host) -> None:
    case = Focus(model="mimo-v2").case("small", (Request(id="a", prompt=(7, 19), max_new_tokens=1),))
    shims = {*stubs.GPU, *stubs.IDLE, "transformers.models.*.modeling_*"}
    assert {f"{name}: a stub, which raises when it is called" for name in shims} <= {*stubbed(busy_trace.header.engine)}
    assert stubbed(host.engine(case).info) == stubbed(busy_trace.header.engine)


def stubbed(engine: EngineInfo) -> list[str]:
    return [shim for shim in engine.shims if shim.endswith(": a stub, which raises when it is called")]


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_with_a_torch_for_cuda_the_cpu_is_the_device_where_none_is_named(
    cuda: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang asks it for the stream of a capture: CUDA's cannot be had in a fork."""
    shims = list[str]()
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: device or "the accelerator of this torch")
    state_layers.name_the_cpu(shims)
    none, named = torch.get_device_module(), torch.get_device_module("cuda")
    assert (none, named) == ("the accelerator of this torch" if cuda is None else torch.cpu, "cuda")
    assert len(shims) == (cuda is not None)
