"""Kernel to Python function: fetch a jit function's own source, rewrite it, and compile it in a namespace where `tl`
is ours. Compiled functions are cached per function and checked against its globals, so that a replaced helper or
constant is noticed. launch.py asks for kernels; the embedding program may ask for many at once (`precompile`) before
it forks.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import triton
import triton.language as real_tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import _normalize_ty

from . import lanes, language, values
from .dtypes import BOOL, F16, F32, F64, Opaque, PointerType
from .rewrite import PREFIX, Rewriter
from .state import MARK, Unsupported

# The names that rewritten kernel source may call besides its own globals: operators, tensor methods, dtype methods.
# rewrite.py puts calls to them in place of operators and methods; compiler.py gives them to every compiled function.


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
_TENSOR_METHODS = """
to cast sum max min argmax argmin xor_sum cumsum cumprod reshape view trans permute broadcast_to expand_dims ravel abs exp exp2
log log2 sqrt rsqrt sigmoid sin cos floor ceil split gather sort flip reduce associative_scan
""".split()  # noqa: SIM905
_OPERATORS = """
add sub mul truediv floordiv mod and_ or_ xor shl shr invert negate lt le gt ge eq ne typed
""".split()  # noqa: SIM905

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


_MISSING = object()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel or device function, ready to call with numpy values.  `code` is what it was compiled from, and `uses` are the
    globals it was compiled against."""

    name: str
    code: types.CodeType
    function: Callable[..., Any]
    parameters: dict[str, bool]  # name -> whether it is a constexpr, in order
    defaults: dict[str, Any]
    uses: tuple[tuple[dict[str, Any], str, Any], ...]
    devices: tuple[Device, ...]
    laned: bool  # its own body uses nothing that lacks a form with lanes
    heavy: bool  # its own body computes with blocks
    stored: frozenset[str]  # names, of parameters and values, that it stores to by

    def runs_in_lanes(self) -> bool:
        """Whether groups of programs may run at once: nothing here or in its callees lacks lanes."""
        return self.laned and all(compile_kernel(device.fn).runs_in_lanes() for device in self.devices)


class Device:
    """A jit function as seen from a kernel: compiled at its first call."""

    __slots__ = ("call", "fn")

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.call: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.call is None:
            self.call = compile_kernel(self.fn).function
        return self.call(*args, **kwargs)


class _Module:
    """Attribute access on a module from within a kernel, each result adapted.  For triton.language our functions come
    first."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module
        if module.__name__.startswith("triton.language"):
            self.__dict__.update(language.NAMES)
            self.__dict__["math"] = self

    def __getattr__(self, name: str) -> Any:
        found = adapt(getattr(self._module, name))
        self.__dict__[name] = found
        return found


_modules: dict[str, _Module] = {}
_HOST = {triton.cdiv: language.cdiv, triton.next_power_of_2: triton.next_power_of_2}


def adapt(value: Any) -> Any:
    """A global, default or constexpr argument of a kernel as its compiled form sees it."""
    if isinstance(value, real_tl.constexpr):
        return adapt(value.value)
    if isinstance(value, types.ModuleType):
        name = value.__name__
        if name.partition(".")[0] in sys.stdlib_module_names:
            return value
        plain = name in ("triton.language.core", "triton.language.standard", "triton.language.math")
        if plain:
            value, name = real_tl, real_tl.__name__
        if name not in _modules:
            _modules[name] = _Module(value)
        return _modules[name]
    if isinstance(value, InterpretedFunction):
        known = language.NAMES.get(value.fn.__name__) if value.fn.__module__.startswith("triton.language") else None
        return known or Device(value.fn)
    if isinstance(value, real_tl.pointer_type):
        return PointerType(adapt(value.element_ty))
    if isinstance(value, real_tl.dtype):
        names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
        name = names.get(value.name, value.name.replace("fp8", "float8"))
        if name not in language.DTYPES:
            raise Unsupported(f"dtype {value.name}")
        return language.DTYPES[name]
    if getattr(value, "__module__", "").startswith("triton.language") and callable(value):
        if value.__name__ not in language.NAMES:
            return partial(_refuse, value.__name__)
        return language.NAMES[value.__name__]
    try:
        return _HOST.get(value, value)
    except TypeError:  # unhashable
        return value


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise Unsupported(f"tl.{name}")


_cache: dict[Any, Compiled] = {}
_watched: dict[str, tuple[Callable[[ast.AST], None], str, Callable[[Any], object]]] = {}


def watch(name: str, rewrite: Callable[[ast.AST], None], called: str, note: Callable[[Any], object]) -> None:
    """Have the kernel, or the function that kernels call, of this dotted name say what of it runs: `rewrite` adds calls of the
    global `called` to its tree, and `note` gets what they say. Call it before the function is compiled."""
    _watched[name] = rewrite, called, note


def dotted_name(fn: Any) -> str:
    """module.function, or module.outer.inner, of a Python function."""
    return f"{fn.__module__}.{fn.__qualname__}".replace(".<locals>", "")


# What reads a block's shape or rank, or works on its last axis, would see the lanes.
_NO_LANES = frozenset(
    "shape numel type reduce associative_scan histogram sort topk flip ravel join split interleave cat gather".split()  # noqa: SIM905
)
# Lanes turn scalar work into work on small arrays, which is slower: they pay where a kernel computes with blocks.
_HEAVY = frozenset(("dot", "exp", "exp2"))


def _closure(fn: Any) -> dict[str, Any]:
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _compile(fn: Any) -> Compiled:
    try:
        above = "\n" * (fn.__code__.co_firstlineno - 1)  # the lines keep their numbers
        tree = ast.parse(above + textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError) as error:
        raise Unsupported(f"source not available: {error}") from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise Unsupported("not a plain function")
    scope = {**fn.__globals__, **_closure(fn)}
    signature = inspect.signature(fn).parameters
    annotations = {name: _normalize_ty(kind) for name, kind in inspect.get_annotations(fn).items()}
    parameters = {name: annotations.get(name) == "constexpr" for name in signature}
    assigned = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    constexprs = frozenset(name for name, constexpr in parameters.items() if constexpr and name not in assigned)
    stored = _stored_names(definition, scope)
    Rewriter(lambda name: isinstance(scope.get(name), types.ModuleType), METHODS, constexprs).visit(definition)
    nodes = list(ast.walk(ast.fix_missing_locations(tree)))
    noted = _watched.get(dotted_name(fn))
    if noted is not None:
        noted[0](tree)
    used = {node.id for node in nodes if isinstance(node, ast.Name) and node.id in scope}
    uses = tuple((fn.__globals__, name, fn.__globals__[name]) for name in sorted(used) if name in fn.__globals__)
    namespace = {"__builtins__": builtins, **RUNTIME, **{name: adapt(scope[name]) for name in used}}
    if noted is not None:
        namespace[noted[1]] = noted[2]
    exec(compile(tree, fn.__code__.co_filename, "exec"), namespace)
    function = namespace[definition.name]
    function.__defaults__ = None if fn.__defaults__ is None else tuple(adapt(d) for d in fn.__defaults__)
    function.__kwdefaults__ = None if fn.__kwdefaults__ is None else {n: adapt(d) for n, d in fn.__kwdefaults__.items()}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return Compiled(
        name=definition.name,
        code=fn.__code__,
        function=function,
        parameters=parameters,
        defaults={n: p.default for n, p in signature.items() if p.default is not inspect.Parameter.empty},
        uses=uses,
        devices=tuple(value for value in namespace.values() if isinstance(value, Device)),
        laned=_NO_LANES.isdisjoint(attributes) and not any(name.startswith("atomic") for name in attributes),
        heavy=not _HEAVY.isdisjoint(attributes),
        stored=stored,
    )


def _stored_names(definition: ast.FunctionDef, scope: Mapping[str, Any]) -> frozenset[str]:
    """The names that go into a pointer of a store, of the kernel itself or of a device function that it calls."""
    stored, made_of = set[str](), list[tuple[set[str], set[str]]]()
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            made_of.append(({name for target in targets for name in _names(target)}, _names(node.value)))
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            called = scope.get(name) if isinstance(node.func, ast.Name) else None
            if name == "store" or name.startswith("atomic"):
                stored |= _names(node.args[0])
            elif isinstance(called, InterpretedFunction):
                given = dict(zip(called.arg_names, node.args, strict=False))
                given |= {one.arg or "": one.value for one in node.keywords}
                with contextlib.suppress(Unsupported):
                    for parameter in compile_kernel(called.fn).stored & given.keys():
                        stored |= _names(given[parameter])
    for _ in made_of:
        stored |= {name for targets, names in made_of if targets & stored for name in names}
    return frozenset(stored)


def _names(node: ast.AST) -> set[str]:
    """Names in an expression, but for those that it loads by."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
        return set()
    own = {node.id} if isinstance(node, ast.Name) else set[str]()
    return own.union(*map(_names, ast.iter_child_nodes(node)))


def _fresh(fn: Any, entry: Compiled) -> bool:
    if fn.__code__ is not entry.code:
        return False
    for scope, name, value in entry.uses:
        if scope.get(name, _MISSING) is not value:
            return False
    for device in entry.devices:
        known = _cache.get(device.fn)
        if device.call is not None and (known is None or device.call is not known.function or not _fresh(device.fn, known)):
            return False
    return True


def compile_kernel(fn: Any) -> Compiled:
    """The compiled form of a kernel's Python function; recompiled if a global it uses was replaced, or its code.
    Unsupported if it cannot be."""
    entry = _cache.get(fn)
    if entry is None or not _fresh(fn, entry):
        entry = _cache[fn] = _compile(fn)
    return entry


def stored_names(fn: Any) -> frozenset[str]:
    """The names in a kernel's source that it stores to by; none of one that cannot be compiled."""
    try:
        return compile_kernel(fn).stored
    except Unsupported:
        return frozenset()


def precompile(targets: Iterable[Any]) -> dict[str, str]:
    """Compile kernels now, in order: each target is a jit function, a module, or a prefix (str) of imported modules'
    names.

    Device functions that they call are compiled too.  Returns {kernel: reason} of those that cannot be compiled.
    Touches no thread, process or file other than the sources; call it in a process that forks later and the children
    inherit the result.
    """
    failed: dict[str, str] = {}
    for target in targets:
        if isinstance(target, str):
            modules = [sys.modules[name] for name in sorted(sys.modules) if name.startswith(target)]
        else:
            modules = [target]
        for item in modules:
            found = list(vars(item).values()) if isinstance(item, types.ModuleType) else [item]
            for kernel in found:
                while not isinstance(kernel, InterpretedFunction) and isinstance(
                    getattr(kernel, "fn", None), triton.runtime.jit.KernelInterface
                ):
                    kernel = kernel.fn  # autotune and heuristics wrap the kernel
                if isinstance(kernel, InterpretedFunction):
                    try:
                        _warm(kernel.fn)
                    except Unsupported as error:
                        failed[kernel.fn.__name__] = str(error)
    return failed


def _warm(fn: Any) -> None:
    for device in compile_kernel(fn).devices:
        if device.call is None:
            device.call = compile_kernel(device.fn).function
            _warm(device.fn)
