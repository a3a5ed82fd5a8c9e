"""Verify that samples, on a machine without a GPU: SGLang takes the argmax there, whatever the requests ask for.

Where it decides so differs: from 0.5.21 on in a function of its own, before that in a condition in the middle of eagle_sample
(0.5.14 to 0.5.20). Earlier releases sample in a method of the verify input, which is left as it is.
"""

import importlib
import importlib.util
import re
from typing import Any

from eagletwin.harness.core.patch import Edit

from .. import patches
from ..not_driven import NotDriven
from ..stand_ins import sampling_ops

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
    for function in sampling_ops.FUNCTIONS:
        name = function.__name__
        setattr(kernels, name, function)
        if hasattr(utilities, name):  # bound while it was imported, to nothing
            setattr(utilities, name, function)
        shims.append(f"sgl_kernel.{name}: sampling_ops.py, from its semantics")


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
