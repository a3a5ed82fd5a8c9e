"""SGLang in this process, for calling one of its functions at a time: no scheduler, no model, no engine.

What only a GPU needs is stubbed, and module flags send SGLang to its own Triton kernels, both as in the engine's processes
(harness/engines/sglang). Nothing is imported before a property asks for a function. Every name is data: no module of SGLang
is named in an import statement.
"""

import importlib
import inspect
import sys
import warnings
from functools import cache
from types import ModuleType
from typing import Any

SPECULATIVE = "sglang.kernels.ops.speculative"
TREE = f"{SPECULATIVE}.spec_tree"
EAGLE = f"{SPECULATIVE}.eagle"
TOPK1 = f"{SPECULATIVE}.topk1"
PACK = f"{SPECULATIVE}.pack_verify_mask"
LOCS = f"{SPECULATIVE}.cache_locs"
ROTATE = f"{SPECULATIVE}.multi_layer_eagle"
SAMPLING = f"{SPECULATIVE}.reject_sampling"
MOVE = "sglang.kernels.ops.kvcache.cache_move"
POOLS = "sglang.srt.mem_cache.memory_pool"
INDEX = "sglang.srt.mem_cache.index_key_cache"
WORKER = "sglang.srt.speculative.eagle_worker_common"
UTILS = "sglang.srt.speculative.eagle_utils"
SPEC = "sglang.srt.speculative.spec_utils"
SAMPLER = "sglang.srt.layers.sampler"
SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
RECONSTRUCT = f"{SPECULATIVE}.reconstruct_tree"
NGRAM = "sglang.srt.speculative.ngram_worker"
DSV4 = "sglang.srt.layers.attention.deepseek_v4_backend"
DSA = "sglang.srt.layers.attention.dsa_backend"
DSV4_PLANS = "sglang.kernels.ops.attention.dsv4.attn_metadata_kernels"

MODULES = (
    *(TREE, EAGLE, TOPK1, PACK, LOCS, ROTATE, SAMPLING, MOVE, POOLS, INDEX, WORKER, UTILS, SPEC, SAMPLER),
    *(SCATTER, RECONSTRUCT, NGRAM, DSV4, DSV4_PLANS, DSA),
)
"""The modules of 0.5.23 that hold the functions of this tier."""

# Where earlier releases keep the functions of a module, the latest first. Seen on 0.5.9 to 0.5.22.
_OLDER = "sglang.srt.speculative.triton_ops"
FORMER = {
    TREE: (f"{_OLDER}.spec_tree", UTILS),
    EAGLE: (f"{_OLDER}.eagle", "sglang.srt.speculative.eagle_info_v2"),
    LOCS: (f"{_OLDER}.cache_locs", "sglang.srt.speculative.eagle_info_v2", SPEC),
    ROTATE: (f"{_OLDER}.multi_layer_eagle", "sglang.srt.speculative.multi_layer_eagle_utils"),
    SAMPLING: ("sglang.srt.speculative.reject_sampling",),
    MOVE: ("sglang.srt.mem_cache.triton_ops.cache_move", POOLS),
    DSV4_PLANS: ("sglang.kernels.ops.attention.dsv4_attn_metadata_kernels",),
    WORKER: ("sglang.srt.speculative.base_spec_worker", "sglang.srt.speculative.eagle_info_v2"),
}


class Absent(AttributeError):
    """This SGLang has no such function, or not one that a CPU can run."""


class Broken(Exception):
    """A module of this SGLang is there and cannot be imported."""


class Homes:
    """A module of 0.5.23, with each attribute from wherever this SGLang keeps it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return find(f"{self._name}.{attribute}")[1]


def load(name: str) -> Any:
    """What stands for this module of 0.5.23 in the SGLang of this process. An attribute that is not there raises Absent; one
    in a module that cannot be imported, Broken."""
    prepare(name)
    return Homes(name)


def module(name: str) -> ModuleType:
    """The module itself, for what replaces a part of it. Raises Absent and Broken."""
    prepare(name)
    found = _import_module(name)
    if found is None:
        raise Absent(f"this SGLang has no module {name}")
    return found


def find(target: str) -> tuple[str, Any]:
    """(dotted name where this SGLang has it, the object). Raises Absent or Broken, which say why it cannot be reached."""
    prepare(target)
    home = next((name for name in MODULES if target.startswith(f"{name}.")), "")
    if not home:
        raise Absent(f"{target} is in none of the modules of this tier")
    attributes = target.removeprefix(f"{home}.").split(".")
    for name in (home, *FORMER.get(home, ())):
        found: Any = _import_module(name)
        if found is None:
            continue
        for attribute in attributes:
            found = (
                inspect.getattr_static(found, attribute, None) if inspect.isclass(found) else getattr(found, attribute, None)
            )
        if getattr(found, "_eagletwin_stub", False):
            raise Absent(f"{target} is a function of {found.__module__}, which a CPU cannot run")
        if found is not None:
            return ".".join([name, *attributes]), found
    raise Absent(f"this SGLang has no {target}")


@cache
def _import_module(name: str) -> ModuleType | None:
    """The module; None if this SGLang has none of this name. Raises Broken."""
    from eagletwin.harness.engines.sglang.boot import boot
    from eagletwin.harness.engines.sglang.compat import verify

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SGLang's own
            found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None
        raise _broken(name, error) from error
    except Exception as error:
        raise _broken(name, error) from error
    verify.choose(boot.SHIMS)
    return found


def _broken(name: str, error: Exception) -> Broken:
    said = " ".join(str(error).split())
    return Broken(f"{name} cannot be imported: {type(error).__name__}: {said}")


def prepare(target: str = "") -> None:
    """Import SGLang itself, and modules of this tier as far as they are there: those up to the one that is, or holds, the
    target, in their order, so that which comes first does not depend on what is asked; all, if it is in none of them. Raises
    what `import sglang` raises."""
    _begin()
    last = next((number for number, name in enumerate(MODULES) if f"{target}.".startswith(f"{name}.")), len(MODULES))
    for name in MODULES[: last + 1]:
        try:
            _import_module(name)
        except Broken:
            continue  # each of its functions says so


@cache
def _begin() -> None:
    from eagletwin.harness.engines.sglang.boot import boot, preimport
    from eagletwin.harness.engines.sglang.stand_ins import stubs

    finder = stubs.StubFinder(idle=())  # what only saves start-up time stays itself: tests of the same process use it
    preimport.ask_transformers()
    stubs.let_image_processors_register(boot.SHIMS)
    sys.meta_path.insert(0, finder)
    importlib.import_module(SPECULATIVE.partition(".")[0])
