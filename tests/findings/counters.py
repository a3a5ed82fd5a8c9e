"""Count what each batch of a scheduler costs. change.py has an engine import this file; it needs torch alone.

`begin(scheduler, kind)` is called where a batch begins. Its counts are appended to the file that EAGLETWIN_COUNTS names, a line
of JSON, when its results are processed, and again when the next one begins: scheduling belongs to a batch as well.

lines     of SGLang's Python that ran
launches  operations of torch, and Triton kernels
waits     calls by SGLang that wait for a GPU where their tensor lies there: item, tolist, cpu, nonzero, synchronize
bytes     copied: by copy_ and to, and into tensors that are made of Python's numbers
"""

import json
import os
import sys
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("lines", "launches", "waits", "bytes")
_WAITS = {"item", "tolist", "cpu", "nonzero", "synchronize"}
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::lift_fresh"}
_counts = dict.fromkeys(KINDS, 0)
_before, _number = "", 0
_sglang: dict[str, bool] = {}  # by a code's file


def begin(scheduler: Any, kind: str) -> None:
    """A batch of this kind begins."""
    global _before, _number
    if _before:
        _write()
    else:
        _Operations().__enter__()
        sys.setprofile(_called)
        process = scheduler.process_batch_result

        def processed(*args: Any) -> Any:
            result = process(*args)
            _write()
            return result

        scheduler.process_batch_result = processed
    _counts.update(dict.fromkeys(KINDS, 0))
    _before, _number = kind, _number + 1
    sys.settrace(_entered)


def _write() -> None:
    with open(os.environ["EAGLETWIN_COUNTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"process": os.getpid(), "number": _number, "kind": _before, **_counts}) + "\n")


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        _counts["launches"] += 1
        if func.name().partition(".")[0] in _COPIES and isinstance(result, Tensor):
            _counts["bytes"] += result.nbytes
        return result


def _is_sglang(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file not in _sglang:
        _sglang[file] = "/sglang/srt/" in file or file.startswith("<sglang.srt.")  # a function that is patched in memory
    return _sglang[file]


def _entered(frame: FrameType, event: str, arg: object) -> Any:  # noqa: ARG001
    return _line if _is_sglang(frame) else None


def _line(frame: FrameType, event: str, arg: object) -> Any:  # noqa: ARG001
    _counts["lines"] += event == "line"
    return _line


def _called(frame: FrameType, event: str, arg: Any) -> None:
    if event == "c_call" and getattr(arg, "__name__", "") in _WAITS and _is_sglang(frame):
        _counts["waits"] += 1
