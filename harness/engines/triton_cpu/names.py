"""The names that rewritten kernel source may call besides its own globals: operators, tensor methods, dtype methods.
rewrite.py puts calls to them in place of operators and methods; compiler.py gives them to every compiled function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import lanes, language, values
from .dtypes import BOOL, F16, F32, F64, Opaque, PointerType
from .rewrite import PREFIX
from .state import MARK


def _bitwidth(dtype: Any) -> int:
    return 1 if dtype == BOOL else int(dtype.itemsize) * 8


def _kinds(kinds: str) -> Callable[[Any], bool]:
    return lambda dtype: isinstance(dtype, np.dtype) and dtype.kind in kinds


_DTYPE_METHODS: dict[str, Callable[[Any], bool]] = {
    "is_ptr": lambda dtype: isinstance(dtype, PointerType),
    "is_fp8": lambda dtype: isinstance(dtype, Opaque) and dtype.itemsize == 1,
    "is_bf16": lambda dtype: isinstance(dtype, Opaque) and dtype.itemsize == 2,
    "is_fp16": lambda dtype: bool(dtype == F16),
    "is_fp32": lambda dtype: bool(dtype == F32),
    "is_fp64": lambda dtype: bool(dtype == F64),
    "is_floating": lambda dtype: isinstance(dtype, Opaque) or _kinds("f")(dtype),
    "is_int": _kinds("iub"),
    "is_int_signed": _kinds("ib"),
    "is_int_unsigned": _kinds("u"),
}
_TENSOR_METHODS = (
    *(
        "to",
        "cast",
        "sum",
        "max",
        "min",
        "argmax",
        "argmin",
        "xor_sum",
        "cumsum",
        "cumprod",
        "reshape",
        "view",
        "trans",
    ),
    *(
        "permute",
        "broadcast_to",
        "expand_dims",
        "ravel",
        "abs",
        "exp",
        "exp2",
        "log",
        "log2",
        "sqrt",
        "rsqrt",
        "sigmoid",
    ),
    *("sin", "cos", "floor", "ceil", "split", "gather", "sort", "flip", "reduce", "associative_scan"),
)
_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "shl", "shr", "invert", "negate"),
    *("lt", "le", "gt", "ge", "eq", "ne", "typed"),
)

RUNTIME: dict[str, Any] = {
    MARK: True,
    **{PREFIX + name: getattr(values, name) for name in _OPERATORS},
    PREFIX + "range": language.int_range,
    PREFIX + "truth": lanes.truth,
    PREFIX + "item": lanes.item,
    PREFIX + "all": slice(None),
    PREFIX + "bitwidth": _bitwidth,
    PREFIX + "method_to": language.to,
    **{f"{PREFIX}method_{n}": language.NAMES[n] for n in _TENSOR_METHODS if n != "to"},
    **{f"{PREFIX}method_{n}": check for n, check in _DTYPE_METHODS.items()},
}
METHODS = frozenset((*_TENSOR_METHODS, *_DTYPE_METHODS))
