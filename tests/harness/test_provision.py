"""What is named is fetched once, whole or not at all, and a release is told apart by what it has."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagletwin.harness.core.case import Request
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.engines import provision
from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.engines.provision import NotFetched, Section, is_whole, provide
from eagletwin.harness.engines.sglang.compat import requests, workers
from eagletwin.harness.engines.sglang.stand_ins import stubs

from ..rows import long, rows
from .wheels import make_release

# What is named is fetched once, whole or not at all: from a folder of tiny wheels, with pip as it is and no network.


# pip's place taken: it notes that it was called, and then copies the wheel, or waits for ever.
STAND_IN = """
import os, shutil, sys, time
from pathlib import Path
with open(os.environ["CALLS"], "a") as calls:
    calls.write("called\\n")
while os.environ.get("HANG"):
    time.sleep(0.05)
time.sleep(0.3)  # long enough for the other process to reach the lock
for wheel in Path(os.environ["PIP_FIND_LINKS"]).glob("*.whl"):
    shutil.copy(wheel, sys.argv[sys.argv.index("--dest") + 1])
"""
PROVIDE = """
import json, sys
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.engines.provision import Section
from eagletwin.harness.engines.provision import provide
kind, name, pins = json.loads(sys.argv[1])
print(provide(Section(kind, name, {pin: tuple(digests) for pin, digests in pins.items()})))
"""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks, and an empty cache."""
    only_place(monkeypatch, tmp_path / "wheels", tmp_path / "cache")
    return tmp_path / "wheels"


def only_place(monkeypatch: pytest.MonkeyPatch, folder: Path, cache: Path) -> None:
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("EAGLETWIN_CACHE", str(cache))


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache into which a release was fetched, once: pip takes most of a second."""
    root = tmp_path_factory.mktemp("fetched")
    with pytest.MonkeyPatch.context() as patch:
        only_place(patch, root / "wheels", root / "cache")
        provide(make_release(root / "wheels"))
    return root / "cache"


@pytest.fixture
def release(wheels: Path, fetched: Path) -> tuple[Section, Path]:
    """It and its folder, in a cache of the test's own; its wheel is where pip looks."""
    section = make_release(wheels)
    shutil.copytree(fetched, cache_folder("releases").parent, dirs_exist_ok=True)
    folder = cache_folder("releases") / section.name
    assert is_whole(folder, section)
    return section, folder


def left(folder: Path) -> set[str]:
    """What lies next to a folder of the cache, but for its lock."""
    return {path.name for path in folder.parent.iterdir() if path.suffix != ".lock"}


def test_a_release_is_fetched_once_and_without_what_is_not_needed(wheels: Path) -> None:
    section = make_release(wheels)
    folder = provide(section)
    assert (folder / "sglang" / "srt" / "engine.py").read_text() == "two = 2\n"
    assert not (folder / "sglang" / "multimodal_gen").exists()
    assert left(folder) == {"0.0.1"}
    shutil.rmtree(wheels)  # from now on nothing can be had
    assert provide(section) == folder


def edit(folder: Path) -> None:
    (folder / "sglang" / "srt" / "engine.py").write_text("two = 3\n")


def cut(folder: Path) -> None:
    (folder / "sglang" / "srt" / "engine.py").write_text("two")


def remove(folder: Path) -> None:
    (folder / "sglang" / "srt" / "engine.py").unlink()


def add(folder: Path) -> None:
    (folder / "numpy.py").write_text("")  # would stand before the environment's


def link(folder: Path) -> None:
    (folder / "torch").symlink_to(folder.parent)  # as `add`, without a file


def lose_the_record(folder: Path) -> None:
    (folder / "sglang-0.0.1.dist-info" / "RECORD").write_text("")


@pytest.mark.parametrize("damage", [*rows([edit, link]), *long(cut, remove, add, lose_the_record)])
def test_a_damaged_folder_is_seen_and_replaced(
    release: tuple[Section, Path], capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    section, folder = release
    damage(folder)
    assert not is_whole(folder, section)
    assert provide(section) == folder
    assert is_whole(folder, section)
    assert left(folder) == {"0.0.1"}
    assert "0.0.1 is damaged; fetching it again" in capfd.readouterr().err


@pytest.mark.slow
def test_bytecode_is_no_damage(release: tuple[Section, Path]) -> None:
    section, folder = release
    (folder / "sglang" / "__pycache__").mkdir()
    (folder / "sglang" / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"")
    assert is_whole(folder, section)


@pytest.mark.usefixtures("release")
def test_without_a_network_the_error_says_what_is_there(wheels: Path) -> None:
    missing = make_release(wheels, "0.0.2")
    shutil.rmtree(wheels)
    with pytest.raises(NotFetched, match=r"0\.0\.2 could not be fetched: .*\n.*releases in the cache: 0\.0\.1\n") as error:
        provide(missing)
    assert error.value.exit_code == 129


@pytest.mark.slow
def test_a_damaged_folder_that_cannot_be_replaced_is_not_used(wheels: Path, release: tuple[Section, Path]) -> None:
    section, folder = release
    edit(folder)
    shutil.rmtree(wheels)
    with pytest.raises(NotFetched, match="releases in the cache: none"):
        provide(section)


def test_another_file_than_the_locked_one_is_refused(wheels: Path) -> None:
    make_release(wheels)
    section = Section("releases", "0.0.1", {"sglang==0.0.1": ("0" * 64,)})
    with pytest.raises(NotFetched, match="DO NOT MATCH"):
        provide(section)


def test_a_wheel_that_is_not_what_its_record_says_is_refused(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFetched, match="RECORD"):
        provide(make_release(wheels, lie=True))
    assert not (tmp_path / "cache" / "releases" / "0.0.1").exists()


def test_a_link_is_the_users_own(wheels: Path, tmp_path: Path) -> None:
    section = make_release(wheels)
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "cache" / "releases").mkdir(parents=True)
    (tmp_path / "cache" / "releases" / "0.0.1").symlink_to(mine)
    assert provide(section).resolve() == mine
    assert not list(mine.iterdir())


def test_a_link_to_nothing_is_no_release(wheels: Path, tmp_path: Path) -> None:
    """Python would pass over it, and import what is installed."""
    section = make_release(wheels)
    (tmp_path / "cache" / "releases").mkdir(parents=True)
    (tmp_path / "cache" / "releases" / "0.0.1").symlink_to(tmp_path / "gone")
    with pytest.raises(NotFetched, match=r"0\.0\.1 is a link whose target is missing"):
        provide(section)


def provider(section: Section, tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    """Another process that provides a section, with the stand-in for pip."""
    import json

    (tmp_path / "stand-in" / "pip").mkdir(parents=True, exist_ok=True)
    (tmp_path / "stand-in" / "pip" / "__init__.py").write_text("")
    (tmp_path / "stand-in" / "pip" / "__main__.py").write_text(STAND_IN)
    paths = [str(tmp_path / "stand-in"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-c", PROVIDE, json.dumps([section.kind, section.name, section.pins])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CALLS": str(tmp_path / "calls"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_two_processes_at_once_fetch_once(wheels: Path, tmp_path: Path) -> None:
    section = make_release(wheels)
    both = [provider(section, tmp_path) for _ in range(2)]
    said = [process.communicate()[0].strip() for process in both]
    assert said == [str(tmp_path / "cache" / "releases" / "0.0.1")] * 2
    assert (tmp_path / "calls").read_text() == "called\n"
    assert is_whole(Path(said[0]), section)


@pytest.mark.slow
def test_what_was_killed_half_way_is_cleared_away_and_fetched_again(wheels: Path, tmp_path: Path) -> None:
    section = make_release(wheels)
    killed = provider(section, tmp_path, HANG="1")
    while not (tmp_path / "calls").exists():
        assert killed.poll() is None
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    releases = tmp_path / "cache" / "releases"
    assert (releases / ".0.0.1.partial").exists()
    assert not (releases / "0.0.1").exists()
    folder = provide(section)
    assert is_whole(folder, section)
    assert left(folder) == {"0.0.1"}


@pytest.mark.long
@pytest.mark.slow
def test_a_real_release_and_its_packages_come_from_the_real_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.9, the smallest, with the packages around transformers 4.57.1: some 20 MB."""
    from eagletwin.harness.engines.source import resolve

    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path))
    try:
        source = resolve("0.5.9")
    except NotFetched as error:
        if "DO NOT MATCH" in str(error) or "RECORD" in str(error):
            raise
        pytest.skip(f"no package index here: {error.cause}")
    assert source.version == "0.5.9"
    release, layer = source.paths
    assert (release / "sglang" / "srt" / "speculative" / "eagle_worker.py").is_file()
    assert {path.name for path in layer.glob("*.dist-info")} >= {"transformers-4.57.1.dist-info", "tokenizers-0.22.2.dist-info"}
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert resolve("0.5.9") == source


# What a release is told apart by is what it has, and what it has not is refused: with stand-ins for parts of SGLang.


class _Scheduler:
    def __init__(self, server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, pp_rank: int, dp_rank: Any) -> None: ...


class _WithDefault:
    def __init__(self, server_args: Any, port_args: Any, gpu_id: int, clock: str = "wall", **more: Any) -> None: ...


class _WithAnotherRank:
    def __init__(self, server_args: Any, port_args: Any, gpu_id: int, spec_rank: int) -> None: ...


def test_a_rank_of_the_scheduler_that_is_not_known_is_refused_by_name() -> None:
    assert workers.ranks_of(_Scheduler, 1) == {"gpu_id": 1, "tp_rank": 1, "pp_rank": 0, "dp_rank": None}
    assert workers.ranks_of(_WithDefault, 0) == {"gpu_id": 0}
    with pytest.raises(NotDriven, match="built with spec_rank, and"):
        workers.ranks_of(_WithAnotherRank, 0)


def _message(ids: Any, *left_out: str) -> type:
    names = ("rid", "sampling_params", "logprob_start_len", "top_logprobs_num", "stream")
    fields = [("input_ids", ids), *((name, Any) for name in names if name not in left_out)]
    return dataclasses.make_dataclass("TokenizedGenerateReqInput", fields)


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have SGLang's message for a request be this class."""

    def give(message: type) -> None:
        monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", SimpleNamespace(TokenizedGenerateReqInput=message))  # type: ignore[arg-type]

    sampling = SimpleNamespace(SamplingParams=lambda **_: SimpleNamespace(normalize=lambda _: None))
    monkeypatch.setitem(sys.modules, "sglang.srt.sampling.sampling_params", sampling)  # type: ignore[arg-type]
    return give


REQUEST = Request(id="a", prompt=(1, 2), max_new_tokens=1)


def test_what_a_request_asks_for_and_a_message_has_no_field_for_is_refused_by_name(give: Any) -> None:
    streams = Request(id="a", prompt=(1, 2), max_new_tokens=1, stream=True)
    give(_message(list[int], "stream"))
    assert not hasattr(requests.tokenized_request(REQUEST, 90), "stream")  # nor is it asked for
    with pytest.raises(NotDriven, match="request 'a': a request of this release has no stream"):
        requests.tokenized_request(streams, 90)
    give(_message(list[int]))
    assert requests.tokenized_request(streams, 90).stream


@pytest.mark.parametrize(("ids", "kind"), [(list[int], list), (array | None, array), ("Optional[array[int]]", array)])
def test_token_ids_are_of_the_kind_that_the_message_takes(give: Any, ids: Any, kind: type) -> None:
    give(_message(ids))
    assert type(requests.tokenized_request(REQUEST, 90).input_ids) is kind


def test_a_draft_that_reads_the_targets_rows_is_refused_where_its_class_has_the_stub_for_a_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever version the installed package has: a tree stands beside it."""
    monkeypatch.setattr(stubs, "stand_in_for_pretrained", lambda: None)
    stub = stubs.StubModule("transformers.modeling_utils").PreTrainedModel
    early, late = type("Model", (stub,), {}), type("Model", (stubs.KeptConfiguration,), {})
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.20"))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "a_model", SimpleNamespace(Model=late))  # type: ignore[arg-type]
    workers.refuse_frozen(("a_model",))
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.23"))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "a_model", SimpleNamespace(Model=early))  # type: ignore[arg-type]
    for modules in (("a_model",), ("no_model_of_this_name",)):
        with pytest.raises(NotDriven, match="a draft that reads the target's rows"):
            workers.refuse_frozen(modules)


def test_a_file_whose_digest_is_known_is_read_again_when_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision, "_SETTLED", float("-inf"))
    file = tmp_path / "a.py"
    file.write_text("1")
    first = provision.digest_of(file)
    with monkeypatch.context() as reading:
        reading.setattr(Path, "read_bytes", lambda _: pytest.fail("it was read again"))
        assert provision.digest_of(file) == first
    status = file.stat()
    while file.stat().st_ctime_ns == status.st_ctime_ns:  # until the system's clock has ticked
        file.write_text("2")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert provision.digest_of(file) != first
