"""One host per test process: SGLang is imported once, engines are forked from it."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from eagletwin.harness.commands.fuzz import corpus
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, Sampling, SGLangSettings
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Limits, Mode
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.testing.twin import Twin

from ..lab.servers import Servers
from . import warm

Runner = Callable[..., tuple[Trace, Verdict]]


@pytest.fixture(scope="session", autouse=True)
def warm_commands() -> Iterator[None]:
    with warm.all_closed():
        yield


@pytest.fixture(autouse=True)
def no_corpus(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No search of a test begins with what an earlier one ran, nor leaves anything for a later one."""
    monkeypatch.setattr(corpus, "cache_folder", tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def cache() -> Path:
    """Of whoever runs the tests, wherever a test has its home."""
    return cache_folder("bytecode").parent


@pytest.fixture
def pytester(pytester: pytest.Pytester, cache: Path) -> pytest.Pytester:
    """Its home is an empty folder, in which all of SGLang and torch would be compiled, and models made, anew."""
    own = cache_folder("bytecode").parent
    for part in ("bytecode", "imports", "models") if own != cache else ():  # the same where EAGLETWIN_CACHE names it
        (cache / part).mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (own / part).rmdir()
        (own / part).symlink_to(cache / part)
    return pytester


@pytest.fixture(scope="session")
def host(eagletwin: Twin) -> Host:
    """The plugin's: one process with SGLang imported serves all tests of this one."""
    return eagletwin.host


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """SGLang and its front end are imported once, for servers that are recorded and others."""
    with Servers() as servers:
        yield servers


@contextmanager
def in_mode(host: Host, mode: Mode) -> Iterator[Host]:
    """The same SGLang in another mode, of one rank: what it imports is the same, and so is the process that has imported it."""
    host.connection()
    other = Host(host._zygote)
    other.mode = mode
    yield other
    other._zygote = None  # it is the other's
    other.close()


@pytest.fixture(scope="session")
def overlapped(host: Host) -> Iterator[Host]:
    """The same with the overlap scheduler."""
    with in_mode(host, Mode(overlap=True)) as other:
        yield other


@pytest.fixture
def run(host: Host, tmp_path: Path) -> Runner:
    """run(case, *edits, limits=…): run a case on the real worker with these edits, and judge it."""
    count = 0

    def run(case: Case, *edits: Edit, limits: Limits = Limits()) -> tuple[Trace, Verdict]:  # noqa: B008  frozen
        nonlocal count
        count += 1
        folder = tmp_path / str(count)
        folder.mkdir()
        patches = (Patch(name="planted", edits=edits),) if edits else ()
        trace = host.engine(case, patches).run(case, folder, limits)
        return trace, judge(trace)

    return run


@pytest.fixture(scope="session")
def busy_case() -> Case:
    """Two requests, chunks, pages, a batch that grows and shrinks, every kind of round, a radix cache: no rule goes idle."""
    return Case(
        name="busy",
        model="llama-tiny",
        num_steps=3,
        page_size=4,
        chunked_prefill_size=8,
        requests=(
            Request(
                id="a",
                prompt=(49, 53, 5, 33, 65, 62, 51, 38, 61, 45, 74, 27, 64, 17, 36, 17, 12, 79, 32),
                max_new_tokens=14,
            ),
            Request(id="b", prompt=(49, 53, 5, 33, 65, 62, 7, 70, 1), max_new_tokens=5, arrive=5),
        ),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=256)),
    )


@pytest.fixture(scope="session")
def busy_trace(host: Host, busy_case: Case, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The trace of busy_case on the unmodified release."""
    return host.engine(busy_case).run(busy_case, tmp_path_factory.mktemp("busy"))


@pytest.fixture(scope="session")
def busy_tree() -> Case:
    """busy_case with trees: pages and holes, branches that change parent, paths that are not in front."""
    return Case(
        name="busy-tree",
        model="llama-tiny",
        num_steps=4,
        topk=3,
        num_draft_tokens=12,
        page_size=4,
        chunked_prefill_size=8,
        requests=(
            Request(
                id="a",
                prompt=(9, 27, 18, 38, 30, 63, 3, 4, 12, 41, 65, 42, 7, 66, 60, 47, 76, 0, 69),
                max_new_tokens=14,
            ),
            Request(id="b", prompt=(9, 27, 18, 38, 30, 63, 16, 67, 1), max_new_tokens=7, arrive=5),
        ),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=384)),
    )


@pytest.fixture(scope="session")
def tree_trace(host: Host, busy_tree: Case, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The trace of busy_tree on the unmodified release."""
    return host.engine(busy_tree).run(busy_tree, tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="session")
def sampled_trace(host: Host, busy_case: Case, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The trace of busy_case with requests that sample, drafts included."""
    ways = (Sampling(temperature=0.7, top_p=0.9), Sampling(top_k=8))
    requests = tuple(
        msgspec.structs.replace(request, sampling=way) for request, way in zip(busy_case.requests, ways, strict=True)
    )
    settings = msgspec.structs.replace(busy_case.engine.sglang, rejection_sampling=True)
    case = msgspec.structs.replace(
        busy_case, name="sampled", requests=requests, engine=msgspec.structs.replace(busy_case.engine, sglang=settings)
    )
    return host.engine(case).run(case, tmp_path_factory.mktemp("sampled"))


@pytest.fixture(scope="session")
def states_case() -> Case:
    """Layers that keep a state: a batch that grows and shrinks, chunks, a retraction. Slots of states are used again."""
    return Case(
        name="states",
        model="qwen3-next-nextn",
        num_steps=3,
        chunked_prefill_size=512,
        chunks=(6, 4),
        requests=(
            Request(id="a", prompt=(17, 72, 8, 32, 15, 63, 57, 60, 48, 26, 12, 62, 3, 49, 55), max_new_tokens=14),
            Request(id="b", prompt=(5, 7), max_new_tokens=6, arrive=3),
        ),
        events=(Event(at=7, kind="retract"),),
        engine=EngineSettings(sglang=SGLangSettings(max_total_tokens=256, max_running_requests=2)),
        exercises=("chunked_prefill", "batch", "batch_shrinks", "rejection", "accept_some", "retraction_in_decode"),
    )


@pytest.fixture(scope="session")
def states_trace(host: Host, states_case: Case, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The trace of states_case on the unmodified release."""
    return host.engine(states_case).run(states_case, tmp_path_factory.mktemp("states"))
