"""Verify in releases: which nodes it accepted, how it samples without a GPU, and trees before there were Triton twins."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from typing import Any

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.errors import not_seen
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.trace import snapshot
from eagletwin.harness.engines.inside import patches
from eagletwin.harness.engines.inside.blame import NotDriven, hand_on

from ..stand_ins import sgl_kernel

# Which nodes verify accepted. From 0.5.21 on its result says so; before that only what samples inside it does.
#
# 0.5.14 to 0.5.20 sample with eagle_sample, which the modules of the workers import by name; up to 0.5.13 it is a method of the
# verify input.


class Accepted:
    """Watches the sampling of one scheduler's verify from `start` to `stop`."""

    def __init__(self) -> None:
        from sglang.srt.managers.utils import GenerationBatchResult

        self._in_result = hasattr(GenerationBatchResult(), "accept_index")
        self.watching = True  # else a verify is let pass: whoever listens to some batches alone turns it off between them
        self._last: Array | None = None
        self._wrapped: list[tuple[Any, str, Callable[..., Any]]] = []

    def start(self) -> None:
        if self._in_result:
            return
        for owner, name in _samplers():
            original = getattr(owner, name)
            self._wrapped.append((owner, name, original))
            setattr(owner, name, self._around(original))

    def stop(self) -> None:
        for owner, name, original in self._wrapped:
            setattr(owner, name, original)
        self._wrapped.clear()

    def index(self, result: Any) -> Array:
        """Of verify's result [n, num_steps + 1]: nodes as numbers in the whole batch, -1 behind the last accepted one."""
        if self._in_result:
            return snapshot(result.accept_index)
        if self._last is None:
            raise not_seen("verify returned, and nothing has sampled")
        last, self._last = self._last, None
        return last

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(*args: Any, **kwargs: Any) -> Any:
            predicted, accept_lens, accept_index = hand_on(original, *args, **kwargs)
            if self.watching:
                self._last = snapshot(accept_index)
            return predicted, accept_lens, accept_index

        return sample


def _samplers() -> list[tuple[Any, str]]:
    """Everything through which a worker reaches what samples: (owner, name of its attribute)."""
    speculative = "sglang.srt.speculative."
    found = [(module, "eagle_sample") for name, module in sys.modules.items() if name.startswith(speculative)]
    found = [(module, name) for module, name in found if name in vars(module)]
    if not found:
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        found = [(owner, "sample") for owner in EagleVerifyInput.__mro__ if "sample" in vars(owner)][:1]
    if not found:
        raise not_seen("no function of this SGLang samples after a verify")
    return found


# Verify that samples, on a machine without a GPU: SGLang takes the argmax there, whatever the requests ask for.
#
# Where it decides so differs: from 0.5.21 on in a function of its own, before that in a condition in the middle of eagle_sample
# (0.5.14 to 0.5.20). Earlier releases sample in a method of the verify input, which is left as it is.

_GATE = re.compile(r"if (sampling_info\.is_all_greedy(?: or _is_\w+)+):")


def open_gate(shims: list[str]) -> None:
    """Let requests that sample be verified by sampling, with stand-ins for what is C++. Call it before a scheduler is built.

    Raises NotDriven on a release without a sampling verify that runs here."""
    utilities: Any = importlib.import_module("sglang.srt.speculative.eagle_utils")
    if hasattr(utilities, "_verify_uses_greedy"):
        utilities._verify_uses_greedy = lambda *, is_all_greedy, **_: is_all_greedy
        shims.append("eagle_utils._verify_uses_greedy: only where all requests are greedy")
    else:
        _open_condition(utilities, shims)
    kernels = importlib.import_module("sgl_kernel")
    for function in sgl_kernel.FUNCTIONS:
        name = function.__name__
        setattr(kernels, name, function)
        if hasattr(utilities, name):  # bound while it was imported, to nothing
            setattr(utilities, name, function)
        shims.append(f"sgl_kernel.{name}: sgl_kernel.py, from its semantics")


def leave_kernels_as_they_are(shims: list[str]) -> None:
    """--enable-deterministic-inference also swaps torch's kernels for ones that give a row the same bits in any batch. They are
    for GPUs, and registering them raises here. What is left of the mode is that coins are hashed from seeds."""
    operators: Any = importlib.import_module("sglang.srt.batch_invariant_ops")
    operators.enable_batch_invariant_mode = lambda *_, **__: None
    shims.append("batch_invariant_ops.enable_batch_invariant_mode: does nothing")
    try:
        hashing: Any = importlib.import_module("sglang.kernels.ops.sampling.murmur_hash")
    except ModuleNotFoundError as error:
        if error.name not in ("sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.sampling"):
            raise
        return  # up to 0.5.16, whose verify draws its coins all the same
    for_cpus = 'if device.type == "cpu":'  # from 0.5.20 on, to sgl_kernel's C++; the release's Triton kernel stands behind it
    if for_cpus in patches.source_of(hashing.murmur_hash32):
        patches.rewrite(Edit(target=f"{hashing.__name__}.murmur_hash32", match=for_cpus, replacement="if False:"))
        shims.append("murmur_hash.murmur_hash32: the Triton kernel on a CPU too")


def _open_condition(utilities: Any, shims: list[str]) -> None:
    sampler = getattr(utilities, "eagle_sample", None)
    found = _GATE.findall(patches.source_of(sampler)) if sampler is not None else []
    if len(found) != 1:
        raise NotDriven(
            "this SGLang verifies greedily on a CPU, and where it decides so is not known: cases that sample run on 0.5.14 "
            "and later, or on a GPU"
        )
    target = f"{utilities.__name__}.eagle_sample"
    patches.rewrite(Edit(target=target, match=found[0], replacement="sampling_info.is_all_greedy"))
    shims.append("eagle_utils.eagle_sample: greedy only where all requests are")


# SGLang up to 0.5.14 builds and verifies draft trees with sgl_kernel's C++ alone, behind a flag for GPUs.
#
# Without the flag the functions fall through all their branches and return without doing anything. Seen on 0.5.9 to
# 0.5.12.post1, read in 0.5.13 and 0.5.14; from 0.5.15 on Triton twins stand behind the XPU flag.

# Where the flag decides about these kernels, and about nothing else that a case calls.
_FLAGGED = (
    "sglang.srt.speculative.eagle_utils",
    "sglang.srt.speculative.eagle_info_v2",  # its cache locations: a Triton kernel, behind the same flag
    "sglang.srt.speculative.triton_ops.cache_locs",  # the same from 0.5.13 on
)


def install(shims: list[str]) -> None:
    """Put our implementations where this SGLang looks for the C++ ones. Call it when the worker's modules are imported."""
    utilities = importlib.import_module("sglang.srt.speculative.eagle_utils")
    if hasattr(utilities, "_is_xpu"):
        return
    kernels = importlib.import_module("sgl_kernel")
    for function in (sgl_kernel.build_tree_kernel_efficient, sgl_kernel.verify_tree_greedy):
        setattr(kernels, function.__name__, function)
        shims.append(f"sgl_kernel.{function.__name__}: {function.__module__.rpartition('.')[2]}.py, from its semantics")
    utilities.sgl_build_tree_kernel_efficient = sgl_kernel.build_tree_kernel_efficient  # type: ignore[attr-defined]
    for name in _FLAGGED:
        if name in sys.modules:
            sys.modules[name]._is_cuda = True  # type: ignore[attr-defined]
            shims.append(f"{name}._is_cuda = True")


# Which implementation a module of SGLang takes: its flags say so, and here they must lead to the release's Triton kernels.
#
# From 0.5.16 on `_is_cpu` leads to sgl_kernel's C++ ops for CPUs; from 0.5.15 on `_is_xpu` leads to Triton twins of CUDA C++
# kernels. Where no flag suits, several functions fall through every branch and return without having done anything. For
# what releases before 0.5.15 have in CUDA C++ alone.

# Modules whose `_is_cpu` branch calls sgl_kernel's C++ ops, and whose other branch calls the release's own Triton kernels.
_INSTEAD_OF_CPU_OPS = ("sglang.kernels.ops.", "sglang.srt.speculative.", "sglang.srt.mem_cache.")
# Modules whose Triton kernels sit behind the XPU flag.
_BEHIND_XPU = (
    "sglang.kernels.ops.speculative.",
    "sglang.srt.speculative.eagle_utils",
    "sglang.srt.speculative.triton_ops.",  # 0.5.15
)


def choose(shims: list[str]) -> None:
    """Set the flags of the modules that are imported by now, and say so in `shims`; again after other imports."""
    for name in sorted(name for name in sys.modules if name.startswith((*_INSTEAD_OF_CPU_OPS, *_BEHIND_XPU))):
        module = sys.modules[name]
        flags = getattr(module, "__dict__", {})
        if name.startswith(_INSTEAD_OF_CPU_OPS) and flags.get("_is_cpu") is True:
            module._is_cpu = False  # type: ignore[attr-defined]
            shims.append(f"{name}._is_cpu = False")
        if name.startswith(_BEHIND_XPU) and flags.get("_is_xpu") is False:
            module._is_xpu = True  # type: ignore[attr-defined]
            shims.append(f"{name}._is_xpu = True")
