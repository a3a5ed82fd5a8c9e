"""Apply patches to SGLang's functions in memory: the new code object takes the place of the old one.

Swapping `__code__` reaches every reference to a function, also those imported by name before. Called by zygote.py before a
scheduler is built.
"""

import ast
import contextlib
import difflib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from eagletwin.harness.core.patch import Edit, Patch

from . import switches

edited: list[tuple[str, ...]] = []  # of each edit of this process its target; of each switch of SGLang all of its targets
_sources: dict[Any, str] = {}  # code objects that edits made -> their source, for an edit of the same function after them
_places: dict[Any, tuple[tuple[int, str], ...]] = {}  # the same -> where in that source each edit begins, and what it is called
_written: list[tuple[str, str]] = []  # of each edit of this process its target, and what it is called
ran: set[str] = set()  # those of them that were called, here or before the fork
reached: set[str] = set()  # edits, by what they are called, of which the statement ran that they changed
uncalled: set[str] = set()  # functions that were watched while an engine was built, and that nothing called


class PatchFailed(Exception):
    """The patch does not fit this SGLang: a name is absent, or its text does not occur exactly once."""


def idle() -> tuple[str, ...]:
    """Edited functions that were never called: what was run says nothing about those edits. A switch of SGLang edits what the
    pull request changed for other machines too, so it is idle only if none of its functions was called."""
    return tuple(dict.fromkeys(target for targets in edited if ran.isdisjoint(targets) for target in targets))


def unreached() -> tuple[str, ...]:
    """Edits of functions that were called and took a branch without an edit. Of several edits of a function one is enough: a
    patch changes branches that exclude each other, as of a replayed graph and without one."""
    taken = {target for target, name in _written if name in reached}
    return tuple(name for target, name in _written if target in ran and target not in taken)


def apply(patch: Patch) -> None:
    """Apply all of a patch, or raise PatchFailed (the process is then of no use). What fits only in part is taken back
    before the patch's other edits are tried."""
    switches.ON.update(patch.switches)
    done: list[tuple[Any, Any]] = []
    listed, written = len(edited), len(_written)
    try:
        if patch.sglang_toggle is not None:
            _toggle(patch.sglang_toggle, done)
        for edit in patch.edits:
            done.append(_edit(edit))
    except PatchFailed:
        if not patch.otherwise:
            raise
        for function, code in reversed(done):
            function.__code__ = code
        del edited[listed:], _written[written:]
        for edit in patch.otherwise:
            _edit(edit)


@contextlib.contextmanager
def watched(targets: Iterable[str]) -> Iterator[None]:
    """While an engine is built: see which of these functions it calls. A patch of one that it does not call comes to the same
    if it is applied when the engine stands. What is edited already, or absent, counts as called."""
    watching: dict[Any, tuple[str, Any, Any]] = {}
    for target in targets:
        with contextlib.suppress(PatchFailed, OSError, TypeError):  # it has no source, or is no function
            function = _resolve(target)
            before = function.__code__
            if function not in watching and before not in _sources:
                source = "\n" * (before.co_firstlineno - 1) + source_of(function)  # the lines keep their numbers
                function.__code__ = _compile(source, function, target, file=before.co_filename)
                watching[function] = target, before, function.__code__
    try:
        yield
    finally:
        for function, (target, before, noted) in watching.items():
            if function.__code__ is noted:
                function.__code__ = before
                uncalled.update({target} - ran)
        ran.difference_update(target for target, _, _ in watching.values())


def may_follow(patch: Patch) -> bool:
    """Whether a patch comes to the same in an engine that stands as in one that is built with it."""
    return patch.sglang_toggle is None and not patch.switches and uncalled.issuperset(patch.targets)


def _toggle(number: int, done: list[tuple[Any, Any]]) -> None:
    """SGLang's own reversal of a pull request (`debug_utils/pr_fix_toggle.py`, 0.5.13 and later). What to put back, and where,
    is added to `done`, also if it fails half way."""
    switch = "sglang.srt.debug_utils.pr_fix_toggle"
    first = len(done)
    try:
        toggle = importlib.import_module(switch)
        with _noted(done):
            toggle._revert_pr_fix(number)
        targets = tuple(f"{function.__module__}.{function.__qualname__}" for function, _ in done[first:])
        if not targets:
            raise PatchFailed("it replaces no function that eagletwin sees, so whether one is called is not known")
        edited.append(targets)
    except Exception as error:
        reason = f"SGLang cannot revert PR #{number} in itself: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and f"{switch}.".startswith(f"{error.name}."):
            reason = (
                f"this SGLang has no switch that undoes PR #{number} (0.5.13 and later have): without the fix, look as it is"
            )
        raise PatchFailed(reason) from error


@contextlib.contextmanager
def _noted(done: list[tuple[Any, Any]]) -> Iterator[None]:
    """While SGLang's switch replaces functions: note what each was, and have what it becomes note its calls as an edit does."""
    patcher: Any = importlib.import_module("sglang.srt.debug_utils.source_patcher.code_patcher")
    patch = patcher.patch_function

    def noted(*, target: Any, edits: Any, **others: Any) -> Any:
        source, code = inspect.getsource(target), target.__code__
        done.append((target, code))
        state = patch(target=target, edits=edits, **others)
        source = textwrap.dedent(patcher.apply_edits(source=source, edits=edits))
        target.__code__ = _compile(source, target, f"{target.__module__}.{target.__qualname__}")
        _sources[target.__code__] = source
        return state

    patcher.patch_function = noted
    try:
        yield
    finally:
        patcher.patch_function = patch


def _edit(edit: Edit) -> tuple[Any, Any]:
    """Apply an edit; what to put back, and where, to take it back."""
    done = rewrite(edit)
    edited.append((edit.target,))
    _written.append((edit.target, _called(edit)))
    return done


def _called(edit: Edit) -> str:
    return f"{edit.target}: {edit.match.strip()!r}"


def rewrite(edit: Edit) -> tuple[Any, Any]:
    """The same, without listing the function among what a patch changed."""
    function = _resolve(edit.target)
    source = source_of(function)
    occurrences = source.count(edit.match)
    if occurrences != 1:
        near = difflib.get_close_matches(edit.match.strip().split("\n")[0], [line.strip() for line in source.split("\n")], 1)
        hint = f"; the line most like it is {near[0]!r}" if near and not occurrences else ""
        raise PatchFailed(
            f"{edit.target}: {edit.match!r} occurs {occurrences} times, not once{hint} (the function's source is taken without "
            "the indentation of its def)"
        )
    before = source[: source.index(edit.match)].rpartition("\n")[2]
    indentation = before[: len(before) - len(before.lstrip())]
    replacement = edit.replacement.replace("\n", "\n" + indentation)
    at, grown = source.index(edit.match), len(replacement) - len(edit.match)
    source = source.replace(edit.match, replacement)
    before_it = function.__code__
    places = tuple((place + grown * (place > at), name) for place, name in _places.get(before_it, ()))
    places += ((at + _indented(replacement), _called(edit)),)
    function.__code__ = _compile(source, function, edit.target, places)
    _sources[function.__code__], _places[function.__code__] = source, places
    return function, before_it


def _indented(text: str) -> int:
    """How many blanks a text begins with."""
    return len(text) - len(text.lstrip())


def source_of(function: Any) -> str:
    """The source of a function as it stands, edits included, without the indentation of its def."""
    return _sources.get(function.__code__) or textwrap.dedent(inspect.getsource(function))


def _resolve(target: str) -> Any:
    """The plain function behind a dotted name: module.function or module.Class.method."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        except Exception as error:  # it is a module for another machine, or another model
            raise PatchFailed(f"{target}: its module cannot be imported here: {type(error).__name__}: {error}") from error
        try:
            for part in parts[cut:]:
                found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        except AttributeError:
            break
        found = inspect.unwrap(getattr(found, "__func__", found))
        if not inspect.isfunction(found):
            raise PatchFailed(f"{target} is a {type(found).__name__}, not a function")
        return found
    raise PatchFailed(f"{target} does not exist in this SGLang")


def _compile(
    source: str, function: Callable[..., Any], target: str, places: tuple[tuple[int, str], ...] = (), file: str = ""
) -> Any:
    """Code object of the edited function. Free variables (`__class__` of a method that calls super()) are kept. The statements
    at these places of the source note that they ran. file: what a traceback calls it; "": that it is patched."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise PatchFailed(f"{target}: the edited source does not parse: {error.msg} at {line!r}") from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise PatchFailed(f"{target}: not a plain function")
    definition.decorator_list = []  # they wrapped the original, and still do
    for place, name in places:
        _note_statement(definition, source.count("\n", 0, place) + 1, name)
    note = ast.parse(f"import {__name__} as _patches\n_patches.ran.add({target!r})").body
    documented = ast.get_docstring(definition) is not None
    definition.body[documented:documented] = note
    free = function.__code__.co_freevars
    if free:
        maker = ast.parse(f"def _maker({', '.join(free)}):\n    pass").body[0]
        assert isinstance(maker, ast.FunctionDef)
        maker.body = [definition]
        tree.body = [maker]
    code = compile(ast.fix_missing_locations(tree), file or f"<{target}, patched>", "exec")
    return _find_code(code, function.__name__)


def _note_statement(definition: ast.FunctionDef, line: int, name: str) -> None:
    """Have the innermost statement on a line note that it is about to run; on the line of `def`, the whole function."""
    blocks = [
        block
        for node in ast.walk(definition)
        for part in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(node, part, None), list)
    ]
    found = [
        (statement.lineno, block, statement)
        for block in blocks
        for statement in block
        if isinstance(statement, ast.stmt) and statement.lineno <= line <= (statement.end_lineno or statement.lineno)
    ]
    note = ast.parse(f"import {__name__} as _patches\n_patches.reached.add({name!r})").body
    if not found:
        definition.body[bool(ast.get_docstring(definition)) : bool(ast.get_docstring(definition))] = note
        return
    _, block, statement = max(found, key=lambda one: one[0])  # of two that hold a line, the inner one begins later
    at = block.index(statement)
    block[at:at] = note


def _find_code(code: Any, name: str) -> Any:
    for constant in code.co_consts:
        if inspect.iscode(constant):
            if constant.co_name == name:
                return constant
            try:
                return _find_code(constant, name)
            except PatchFailed:
                continue
    raise PatchFailed(f"{name} was lost in compilation")
