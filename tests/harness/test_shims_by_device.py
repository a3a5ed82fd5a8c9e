"""A scheduler is prepared for what its cases use on every device: by modules that stand in for SGLang's, and no GPU."""

import sys
from types import SimpleNamespace

import pytest

from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.engines.sglang.blame import NotDriven
from eagletwin.harness.engines.sglang.boot import boot

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
    monkeypatch.setattr(boot.server_arguments, "register", lambda *_: None)
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
