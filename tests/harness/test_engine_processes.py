"""What the processes of engines import, replace, remember and work out once, without an engine."""

import errno
import importlib
import marshal
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import msgspec.structs
import pytest

from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.errors import unwritable
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.run_spec import CPU, Mode
from eagletwin.harness.engines.inside import own_loader, patches
from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.engines.inside.forking import left_to_the_engine
from eagletwin.harness.engines.inside.own_loader import SourceFinder, import_early
from eagletwin.harness.engines.sglang.boot import boot, preimport
from eagletwin.harness.engines.sglang.boot.preimport import _load_or_compute
from eagletwin.harness.engines.source import INSTALLED
from eagletwin.harness.engines.start import _environment

from . import imported

# What the environment of an engine's processes changes in the packages that it imports.


# A build of torch for CUDA, on a host with a driver: that one starts where torch counts the devices of CUDA's runtime.
_ASKED = """
import torch
def starts_the_driver():
    raise SystemExit("CUDA's driver was started")
torch.cuda._is_compiled = lambda: True
torch._C._cuda_getDeviceCount = starts_the_driver
torch.cuda._device_count_nvml = lambda: len(torch.cuda._parse_visible_devices())
print(torch.cuda.is_available())
"""


def test_an_engine_on_a_cpu_leaves_cudas_driver_alone() -> None:
    """A fork of a process that started it once ended in cuInit on an H200, with driver 580.159."""
    environment = _environment(INSTALLED, CPU)
    asked = subprocess.run([sys.executable, "-c", _ASKED], env=environment, capture_output=True, text=True, timeout=120)
    assert (asked.stdout, asked.stderr) == ("False\n", "")


# Imports before a fork: what is not there is passed over, and any other failure is listed.


def test_what_fails_in_the_middle_is_listed_once_and_the_rest_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "early_half.py").write_text("import early_whole\nraise RuntimeError('registered twice')\n")
    (tmp_path / "early_needs.py").write_text("import early_absent\n")
    (tmp_path / "early_whole.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    shims: list[str] = []
    for _ in range(2):
        import_early(("early_absent", "early_needs", "early_half", "early_whole"), shims)
    assert shims == ["early_half: failed when it was imported before the fork: RuntimeError: registered twice"]
    assert "early_whole" in sys.modules


def test_what_is_left_to_the_engine_is_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    with left_to_the_engine():
        raise OSError("no space for a model")
    assert "OSError: no space for a model" in capsys.readouterr().err


# The decorators of torch.compile give the function back, and its compiler is loaded when something else of it is asked for.


PROGRAM = """
import sys
import torch
from eagletwin.harness.engines.sglang.boot import speedups

speedups.leave_out_dynamo([])

def double(x):
    return 2 * x

assert torch.compile(double) is double
assert torch.compile(double, dynamic=True) is double
assert torch.compile(dynamic=True)(double) is double
assert torch.compiler.disable(double) is double
assert torch.compiler.disable(recursive=False)(double) is double
assert torch._dynamo.disable(double) is double
assert torch.compile(model=double, dynamic=True) is double
assert torch.compiler.disable(fn=double) is double
assert torch._dynamo.disable(fn=double) is double
assert torch.compiler.assume_constant_result(double) is double
assert "torch._dynamo" not in sys.modules
assert not torch._dynamo.is_compiling()
assert torch._dynamo is sys.modules["torch._dynamo"]
import torch._dynamo.config
torch._dynamo.config.suppress_errors = True
assert torch.compile(double)(2) == 4
"""


SET = """
import torch
from eagletwin.harness.engines.sglang.boot import speedups

speedups.leave_out_dynamo([])
held = torch._dynamo
held.one = 1
held.two = 2
import torch._dynamo
assert (torch._dynamo.one, torch._dynamo.two) == (1, 2)
assert torch._dynamo is not held
"""


@pytest.mark.long
@pytest.mark.slow
def test_decorators_give_the_function_back_and_the_compiler_comes_when_it_is_asked_for() -> None:
    done = imported.run(["-c", PROGRAM], Path.cwd(), os.environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_what_is_set_on_the_compiler_before_it_is_loaded_is_set_on_the_compiler() -> None:
    done = imported.run(["-c", SET], Path.cwd(), os.environ)
    assert done.returncode == 0, done.stderr


# Stubs import, and never return: a kernel that silently did nothing would pass for one that ran.


STUBS_PROGRAM = """
import importlib, sys
from eagletwin.harness.engines.sglang.stand_ins import stubs
stubs.install()
for name in stubs.GPU:
    module = importlib.import_module(name)
    deeper = importlib.import_module(f"{name}.some.thing")
    assert deeper.__name__ == f"{name}.some.thing"
    class Child(module.Base): pass
    def annotated(x: module.Type | None) -> "None": ...
    assert isinstance(Child(), Child) and not isinstance(1, module.Base)
    for call in (module.function, module.Class.method, deeper.op):
        try:
            call(1)
        except stubs.StubCalled as error:
            assert name in str(error) and "<string>" in str(error), error
        else:
            raise AssertionError(f"{name} returned")
assert len(stubs.called) == 3 * len(stubs.GPU), stubs.called
import json
assert hasattr(json, "loads")
"""

ONE_MODULE = """
import importlib, sys
from eagletwin.harness.engines.sglang.stand_ins import stubs
sys.meta_path.insert(0, stubs.StubFinder(gpu=(), idle=("json.tool", "xml.sax", "absent", "xml.absent")))
import json.decoder, xml.dom
from json.tool import main
from xml.sax.handler import ContentHandler
class Child(ContentHandler): pass
assert json.loads("1") == 1 and xml.dom.Node.ELEMENT_NODE == 1
for call, name in ((main, "json.tool.main"), (ContentHandler, "xml.sax.handler.ContentHandler")):
    try:
        call()
    except stubs.StubCalled as error:
        assert str(error).startswith(f"{name} was called at <string>"), error
    else:
        raise AssertionError(f"{name} returned")
for name in ("absent", "xml.absent"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError(f"{name} was found")
"""


def test_a_stub_imports_subclasses_annotates_and_raises_by_name_when_it_is_called() -> None:
    subprocess.run([sys.executable, "-c", STUBS_PROGRAM], check=True)


def test_an_idle_module_is_stubbed_by_its_full_name_with_all_below_it_and_only_where_it_exists() -> None:
    subprocess.run([sys.executable, "-c", ONE_MODULE], check=True)


# What is the same for every engine is worked out once: it is what it was, and it is not worked out again.


class Arguments(msgspec.Struct):
    """As SGLang's ServerArgs is."""

    steps: int
    topk: int = 1


class Configuration:
    """As transformers' is: its text is long, and takes long."""

    model_type = "llama"
    written = 0

    def __repr__(self) -> str:
        type(self).written += 1
        return "all of it"


@pytest.fixture
def shims(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is installed says, and is taken out again behind the test."""
    theirs = ModuleType("transformers.configuration_utils")
    monkeypatch.setattr(theirs, "PreTrainedConfig", Configuration, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setattr(sys.modules["transformers"], "configuration_utils", theirs, raising=False)
    monkeypatch.setitem(sys.modules, "transformers.configuration_utils", theirs)
    monkeypatch.setattr(Configuration, "__repr__", Configuration.__repr__)
    monkeypatch.setattr(msgspec.structs, "fields", msgspec.structs.fields)
    found: list[str] = []
    preimport.memoize(found)
    return found


def test_fields_of_a_class_are_those_that_msgspec_finds_and_are_found_once(shims: list[str]) -> None:
    found = msgspec.structs.fields(Arguments)
    assert [(field.name, field.type, field.default) for field in found] == [
        ("steps", int, msgspec.NODEFAULT),
        ("topk", int, 1),
    ]
    assert msgspec.structs.fields(Arguments) is found
    assert [field.name for field in msgspec.structs.fields(Arguments(1))] == ["steps", "topk"]
    with pytest.raises(TypeError):
        msgspec.structs.fields(int)
    assert "msgspec.structs.fields: what it finds is remembered" in shims


def test_a_configuration_that_is_read_is_not_written_down(shims: list[str]) -> None:
    assert f"Model config {Configuration()}" == "Model config Configuration of llama"
    assert Configuration.written == 0
    assert "transformers' PreTrainedConfig.__repr__: the class alone" in shims


# What is remembered from start to start is worked out again when a source file has changed, or its own file is damaged.


def test_it_is_worked_out_once_and_again_when_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path / "cache"))
    folder, asked = tmp_path / "models", []
    source = folder / "llama" / "modeling.py"
    source.parent.mkdir(parents=True)
    source.write_text("class One: ...\n")

    def work_out() -> dict[frozenset[str], dict[str, set[str]]]:
        asked.append(len(asked))
        return {frozenset({"torch"}): {f"model{len(asked)}": {"Model", "Other"}}}

    def ask() -> int:
        assert _load_or_compute("names", folder, work_out) == {frozenset({"torch"}): {f"model{len(asked)}": {"Model", "Other"}}}
        return len(asked)

    assert [ask(), ask()] == [1, 1]
    source.write_text("class Three: ...\n")  # in place: the folder's own time stays
    assert [ask(), ask()] == [2, 2]
    state = source.stat()
    source.write_text("class Seven: ...\n")  # as long as before
    os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert [ask(), ask()] == [3, 3]
    (folder / "llama" / "processing.py").touch()
    assert [ask(), ask()] == [4, 4]
    (folder / "llama" / "processing.py").unlink()  # as it was once
    assert _load_or_compute("names", folder, work_out) == {frozenset({"torch"}): {"model3": {"Model", "Other"}}}
    for file in (tmp_path / "cache" / "imports").iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    assert [ask(), ask()] == [5, 5]


# Bytecode of SGLang is run only if it was made of the source that is there, wherever that lay then.


NAME = "eagletwin_by_content_probe"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Import the module anew, and return what it holds."""
    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [SourceFinder({NAME: own_loader.Loader}.get), *sys.meta_path])

    def load() -> int:
        sys.modules.pop(NAME, None)
        importlib.invalidate_caches()
        value: int = importlib.import_module(NAME).value
        return value

    yield load
    sys.modules.pop(NAME, None)


def kept() -> list[Path]:
    """The files of bytecode."""
    return list((cache_folder("bytecode") / "by-content").iterdir())


def test_an_edit_of_the_same_size_and_time_is_run(tmp_path: Path, load: Callable[[], int]) -> None:
    source = tmp_path / f"{NAME}.py"
    source.write_text("value = 1\n")
    state = source.stat()
    assert load() == 1
    source.write_text("value = 2\n")
    os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert load() == 2


def test_bytecode_of_this_very_source_is_run_and_damaged_bytecode_is_not(tmp_path: Path, load: Callable[[], int]) -> None:
    source = tmp_path / f"{NAME}.py"
    source.write_text("value = 1\n")
    assert load() == 1
    [cached] = kept()
    whole = cached.read_bytes()
    cached.write_bytes(whole.replace(b"value", b"other"))  # the source is not compiled again: it would have no such name
    with pytest.raises(AttributeError, match="value"):
        load()
    cached.write_bytes(whole[:-3])
    assert load() == 1
    assert cached.read_bytes() == whole


def test_what_was_compiled_in_one_tree_is_run_in_another_under_its_own_path(
    tmp_path: Path, load: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def where():\n    return (lambda: 1).__code__.co_filename\n\nvalue = 1\n"
    for tree in ("one", "other"):
        source = tmp_path / tree / f"{NAME}.py"
        source.parent.mkdir()
        source.write_text(text)
        monkeypatch.syspath_prepend(str(source.parent))
        assert load() == 1
        assert len(kept()) == 1
        where = sys.modules[NAME].where
        assert {where.__code__.co_filename, where()} == {str(source)}  # tracebacks name the tree that runs


# A scheduler is prepared for what its cases use on every device: by modules that stand in for SGLang's, and no GPU.


CUDA = Mode(device="cuda")
REQUEST = Request(id="a", prompt=(1, 2), max_new_tokens=2)
HOST_CACHE = Case(
    name="host",
    model="llama-tiny",
    num_steps=2,
    requests=(REQUEST,),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, host_pages=16)),
)
SESSIONS = Case(
    name="sessions",
    model="llama-tiny",
    num_steps=2,
    requests=(Request(id="a", prompt=(1, 2), max_new_tokens=2, session="s"),),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True)),
)


class _Reached(Exception):
    """The scheduler would be built now."""


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What of SGLang is read before a scheduler is built: `write` and `records` tell the releases apart."""

    def write(flush: bool) -> None:
        """As from 0.5.21 on."""

    def reached(*_: object) -> None:
        raise _Reached

    found = SimpleNamespace(write=write, records=SimpleNamespace(session_records=None), pool=SimpleNamespace())
    cache = "sglang.srt.mem_cache"
    modules = {
        "sglang.srt.managers": SimpleNamespace(scheduler=None),
        "sglang.srt.server_args": SimpleNamespace(PortArgs=None, ServerArgs=None),
        f"{cache}.hybrid_cache.hybrid_cache_controller": SimpleNamespace(HybridCacheController=found),
        f"{cache}.pool_host.base": found.pool,
        f"{cache}.base_prefix_cache": SimpleNamespace(BasePrefixCache=found.records),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    monkeypatch.setattr(boot.registry, "register", lambda *_: None)
    monkeypatch.setattr(boot.workers, "choose", reached)
    monkeypatch.setattr(boot, "SHIMS", [])
    return found


def test_a_hierarchical_cache_is_prepared_on_a_gpu(sglang: SimpleNamespace) -> None:
    with pytest.raises(_Reached):
        boot.build_scheduler(HOST_CACHE, CUDA)
    assert sglang.pool.HICACHE_HOST_MEMORY_RESERVE_BYTES == 0
    (shim,) = boot.SHIMS  # and SGLang's own kernels copy
    assert shim.startswith("pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0: ")


@pytest.mark.usefixtures("sglang")
def test_sessions_are_prepared_on_a_gpu() -> None:
    with pytest.raises(_Reached):
        boot.build_scheduler(SESSIONS, CUDA)
    (shim,) = boot.SHIMS
    assert shim.startswith("SessionController: ends sessions")


def test_a_release_whose_parts_are_others_is_refused_on_a_gpu(sglang: SimpleNamespace) -> None:
    sglang.write = lambda: None
    del sglang.records.session_records
    for case, reason in ((HOST_CACHE, "a hierarchical cache"), (SESSIONS, "streaming sessions")):
        with pytest.raises(NotDriven, match=reason):
            boot.build_scheduler(case, CUDA)


# What is behind an exception: files that could not be written, or something else.


def raised_from(error: BaseException) -> RuntimeError:
    try:
        raise RuntimeError("it did not work") from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_file_that_cannot_be_written_is_seen_behind_other_exceptions(number: int) -> None:
    error = OSError(number, "whatever", "/a/file")
    assert unwritable(error).endswith(" (/a/file)")
    assert unwritable(raised_from(raised_from(error))) == unwritable(error)


def test_bytecode_of_which_a_part_was_written_is_seen() -> None:
    with pytest.raises(EOFError) as found:
        marshal.loads(marshal.dumps((1, 2, 3))[:-2])
    assert "bytecode is cut short" in unwritable(found.value)


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone"), RuntimeError("x"), EOFError("gone"), None])
def test_other_exceptions_are_not_the_disk(error: BaseException | None) -> None:
    assert unwritable(error) == ""


def test_an_edited_function_notes_the_blocks_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "noted_module.py"
    file.write_text('def pick(one):\n    """Doc."""\n    if one:\n        return 1\n    return 2\n')
    loader = own_loader._Loader("noted_module", str(file))
    spec = importlib.util.spec_from_file_location("noted_module", file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    edited = "\n\n" + file.read_text().replace("    if one:", "    more = 1\n    if one:").replace(
        "return 1", "return one + more"
    )
    module.pick.__code__ = patches._compile(edited, module.pick, "noted_module.pick")
    assert (module.pick.__doc__, module.pick(0)) == ("Doc.", 2)
    assert own_loader._ran[str(file)] == {2}
    assert module.pick(1) == 2
    assert own_loader._ran.pop(str(file)) == {2, 4}


def test_edits_that_are_prepared_edit_nothing_though_a_later_one_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prepared_module.py").write_text("def pick():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pick = importlib.import_module("prepared_module").pick
    fits = Edit(target="prepared_module.pick", match="return 1", replacement="return 2")
    with pytest.raises(patches.PatchFailed):
        patches.prepare_rewrites((fits, msgspec.structs.replace(fits, match="no such text")))
    assert pick() == 1
    patches.rewrite(fits)
    assert pick() == 2
    sys.modules.pop("prepared_module")
