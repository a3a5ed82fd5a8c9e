"""The installed SGLang in this process, for calling one of its functions at a time: no scheduler, no model, no engine.

What only a GPU needs is stubbed, and module flags send SGLang to its own Triton kernels, both as in the engine's processes
(harness/engines/sglang). Nothing is imported before the first test asks, so that a test process which runs none of these
tests does not pay for it.
"""

import importlib
import sys
import warnings
from functools import cache
from types import ModuleType

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

_ALL = (TREE, EAGLE, TOPK1, PACK, LOCS, ROTATE, SAMPLING, MOVE, POOLS, INDEX, WORKER, UTILS, SPEC, SAMPLER)


@cache
def load(name: str) -> ModuleType:
    """A module of SGLang, imported as the engine imports it."""
    _prepare()
    return sys.modules[name]


@cache
def _prepare() -> None:
    from eagletwin.harness.engines.sglang import boot, stubs
    from eagletwin.harness.engines.sglang.eras import triton_twins

    finder = stubs.StubFinder(idle=())  # what only saves start-up time stays itself: other tests of this process use it
    boot.ask_transformers()
    sys.meta_path.insert(0, finder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's own
        for name in _ALL:
            importlib.import_module(name)
    triton_twins.choose(boot.SHIMS)
