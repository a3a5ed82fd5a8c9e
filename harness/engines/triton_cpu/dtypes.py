"""Names for the element types of kernels: numpy dtypes, and stand-ins for pointers and for what numpy lacks.
Only names; arithmetic on them is values.py's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BOOL, I8, I16, I32, I64 = (np.dtype(t) for t in ("?", "i1", "i2", "i4", "i8"))
U8, U16, U32, U64 = (np.dtype(t) for t in ("u1", "u2", "u4", "u8"))
F16, F32, F64 = (np.dtype(t) for t in ("f2", "f4", "f8"))


class Opaque:
    """A dtype that numpy lacks (bfloat16, float8): pointers to it can be passed and cast, values not computed."""

    __slots__ = ("itemsize", "name")

    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class PointerType:
    """dtype of a pointer; `element_ty` as in Triton."""

    __slots__ = ("element_ty",)

    def __init__(self, element_ty: Any, address_space: int = 1, const: bool = False) -> None:
        self.element_ty = element_ty

    def is_ptr(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PointerType) and bool(other.element_ty == self.element_ty)

    def __hash__(self) -> int:
        return hash((PointerType, self.element_ty))
