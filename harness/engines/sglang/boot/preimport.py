"""What is imported before any SGLang, and is the same for all of them: torch, transformers, what else SGLang imports of others,
and what takes the place of what a CPU lacks. Called by ancestor.py, and by boot.py where no ancestor has done it.
"""

import torch

from eagletwin.harness.core.mode import CPU, Mode

from ..compat import image_processors
from ..own_loader import import_early
from ..stand_ins import stubs
from . import cuda, front_end, speedups

# What was changed. Nobody undoes it: a process that prepares itself runs SGLang for us alone, one configuration in each fork.
SHIMS: list[str] = []

# Packages, and parts of them, that an import of SGLang is long in. What a release does not need costs a little, once.
_NAMES = (
    *("transformers.models.auto", "transformers.processing_utils", "transformers.tokenization_utils_fast"),
    *("triton.language", "torch.distributed", "torch.multiprocessing", "torch.nn.functional", "torch.profiler"),
    *("PIL.Image", "einops", "fsspec", "orjson", "partial_json_parser", "psutil", "pybase64", "pydantic", "requests"),
    *("sentencepiece", "starlette.responses", "tiktoken", "tvm_ffi", "xgrammar", "zmq.asyncio"),
    # in engines, and at their first case
    *("multiprocessing.synchronize", "numpy.ctypeslib", "numpy.ma", "tomllib", "torch.profiler._cupti_monitor"),
    "torch.utils._device",
)


def prepare(mode: Mode = CPU, *, front: bool = False) -> None:
    """Once per process, in front of what SGLang imports. front: for SGLang's HTTP front end too, which needs more of it."""
    if SHIMS:
        return
    torch.set_num_threads(1)
    if mode.device == "cpu":
        speedups.leave_out_dynamo(SHIMS)
    speedups.remember_names(SHIMS)
    ask_transformers()
    speedups.memoize(SHIMS)
    image_processors.install(SHIMS)
    if mode.device == "cuda":
        cuda.prepare(SHIMS, mode)
        return
    idle, spare = (front_end.idle(), front_end.SPARE) if front else (stubs.IDLE, ())
    stubs.install((*stubs.GPU, *cuda.absent(*idle, *spare, "xgrammar")), idle)
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda: None
    # called on CPU tensors by code that overlaps streams; there is one stream here
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    SHIMS.append("torch.cuda.synchronize, torch.cuda.empty_cache, Tensor.record_stream: do nothing")


def import_them() -> None:
    """For engines on a CPU."""
    prepare()
    import_early(_NAMES, SHIMS)


def ask_transformers() -> None:
    """Have transformers look for what is about to be stubbed: it looks once, keeps the answer, and would find the stubs."""
    from transformers.utils import import_utils

    for name in dir(import_utils):
        if name.startswith(("is_torchaudio", "is_torchcodec", "is_torchvision")) and name.endswith("_available"):
            getattr(import_utils, name)()
