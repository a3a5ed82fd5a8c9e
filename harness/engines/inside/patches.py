"""Apply patches to an engine's functions in memory: the new code object takes the place of the old one.

Swapping `__code__` reaches every reference to a function, also those imported by name before. Called by zygote.py before a
scheduler is built.
"""

import ast
import contextlib
import difflib
import importlib
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from eagletwin.harness.core.differs import ChangedFunction, Differs, Point, changes_of, with_executed
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import TITLES
from eagletwin.harness.engines.changed_code import add_calls, changed_points, entry

from . import blame, own_loader
from . import changes as tree_changes
from .changes import CALL, executed

_edited: dict[Any, "_Source"] = {}  # code objects that edits made -> their source, for an edit of the same function after them
ran: set[str] = set()  # edited functions that were called, here or before the fork
uncalled: set[str] = set()  # functions that were watched while an engine was built, and that nothing called


@dataclass(slots=True)
class Applied:
    """A patch of this process. functions: what each function that it edits changed; switch: SGLang's own made the edits, which
    change code for other machines, too."""

    name: str
    functions: list[ChangedFunction] = field(default_factory=list)
    switch: bool = False


applied: list[Applied] = []
_Call = tuple[int, Point, str]  # where in a source a changed statement begins, its point, and its place


@dataclass(frozen=True, slots=True)
class _Source:
    """A function's source without the indentation of its def, the file and line that it is from, and what in it is changed."""

    text: str
    file: str
    first: int
    calls: tuple[_Call, ...] = ()


class PatchFailed(Exception):
    """The patch does not fit this engine: a name is absent, or its text does not occur exactly once."""


def changes() -> tuple[Differs, ...]:
    """What each patch changes, and which of its statements ran."""
    each = (changes_of("", one.functions, patch=one.name) for one in applied if one.functions)
    return tuple(with_executed(differs, executed) for differs in each)


def idle() -> tuple[str, ...]:
    """The functions of patches of which nothing ran: what was run says nothing about those patches."""
    return tuple(name for one in changes() if not one.ran for name in one.idle)


def idle_functions() -> tuple[str, ...]:
    """The functions that were called and of which no changed statement ran, where another of the same patch's did. SGLang's own
    switch changes code for other machines, too, and has none."""
    by_sglang = {one.name for one in applied if one.switch}
    return tuple(name for one in changes() if one.ran and one.patch not in by_sglang for name in one.idle if name in ran)


def apply(patch: Patch) -> None:
    """Apply all of a patch, or raise PatchFailed (the process is then of no use). What fits only in part is taken back
    before the patch's other edits are tried."""
    blame.ON.update(patch.switches)
    done: list[tuple[Any, Any]] = []
    applied.append(Applied(patch.name))
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
        applied[-1] = Applied(patch.name)
        for edit in patch.otherwise:
            _edit(edit)


@contextlib.contextmanager
def watch_calls(targets: Iterable[str]) -> Iterator[None]:
    """While an engine is built: see which of these functions it calls. A patch of one that it does not call comes to the same
    if it is applied when the engine stands. What is edited already, or absent, counts as called."""
    watching: dict[Any, tuple[str, Any, Any]] = {}
    for target in targets:
        with contextlib.suppress(PatchFailed, OSError, TypeError):  # it has no source, or is no function
            function = _resolve(target)
            before = function.__code__
            if function not in watching and before not in _edited:
                above = "\n" * (before.co_firstlineno - 1)  # the lines keep their numbers
                source = _source(function)
                calls = tuple((len(above) + place, point, text) for place, point, text in source.calls)
                function.__code__ = _compile(above + source.text, function, target, calls, file=before.co_filename)
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
        with _note_switch_edits(done):
            toggle._revert_pr_fix(number)
        targets = tuple(f"{function.__module__}.{function.__qualname__}" for function, _ in done[first:])
        if not targets:
            raise PatchFailed("it replaces no function that eagletwin sees, so whether one is called is not known")
    except Exception as error:
        reason = f"SGLang cannot revert PR #{number} in itself: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and f"{switch}.".startswith(f"{error.name}."):
            reason = (
                f"this SGLang has no switch that undoes PR #{number} (0.5.13 and later have): without the fix, look as it is"
            )
        raise PatchFailed(reason) from error


@contextlib.contextmanager
def _note_switch_edits(done: list[tuple[Any, Any]]) -> Iterator[None]:
    """While SGLang's switch replaces functions: note what each was, and have what it becomes note its calls as an edit does."""
    patcher: Any = importlib.import_module("sglang.srt.debug_utils.source_patcher.code_patcher")
    patch = patcher.patch_function

    def patch_and_note(*, target: Any, edits: Any, **others: Any) -> Any:
        before, code = _source(target), target.__code__
        original = inspect.getsource(target)
        done.append((target, code))
        state = patch(target=target, edits=edits, **others)
        source = textwrap.dedent(patcher.apply_edits(source=original, edits=edits))
        _take(target, before, source, f"{target.__module__}.{target.__qualname__}", ())
        applied[-1].switch = True
        return state

    patcher.patch_function = patch_and_note
    try:
        yield
    finally:
        patcher.patch_function = patch


def _edit(edit: Edit) -> tuple[Any, Any]:
    """Apply an edit; what to put back, and where, to take it back."""
    return rewrite(edit, listed=True)


_prepared: dict[tuple[Edit, Any], Any] = {}  # (edit, code before it) -> code after it


def prepare_rewrites(edits: Iterable[Edit]) -> None:
    """Compile these edits now, for the forks of this process that `rewrite` them: nothing is edited here. Raises as `rewrite`
    does for the first that does not fit; those before it are prepared."""
    undo = []
    try:
        for edit in edits:
            function, code = rewrite(edit)
            _prepared[edit, code] = function.__code__
            undo.append((function, code))
    finally:
        for function, code in reversed(undo):
            function.__code__ = code


def rewrite(edit: Edit, *, listed: bool = False) -> tuple[Any, Any]:
    """The same, without listing the function among what a patch changed, unless `listed`."""
    function = _resolve(edit.target)
    if not listed and (edit, function.__code__) in _prepared:
        code, function.__code__ = function.__code__, _prepared[edit, function.__code__]
        return function, code
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
    if function.__code__ not in _edited and edit.match in replacement != edit.match and replacement in source:
        raise PatchFailed(f"{edit.target} has {replacement!r} already")  # a second time it may be another change
    at, grown, code, old = source.index(edit.match), len(replacement) - len(edit.match), function.__code__, _source(function)
    calls = tuple((place + grown * (place > at), point, text) for place, point, text in old.calls)
    _take(function, old, source.replace(edit.match, replacement), edit.target, calls, listed=listed)
    return function, code


def _source(function: Any) -> _Source:
    """The source of a function as it stands. Raises OSError and TypeError where it has none."""
    code = function.__code__
    if code in _edited:
        return _edited[code]
    lines, first = inspect.getsourcelines(function)
    whole = "".join(lines)
    text = textwrap.dedent(whole)
    indentation = len(lines[0]) - len(text.partition("\n")[0]) - 1
    begins = [0, *itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
    in_tree = tree_changes.calls_in(code.co_filename, first, first + len(lines) - 1)
    calls = tuple((begins[point.line - first] + point.column - indentation, point, place) for point, place in in_tree)
    return _Source(text, code.co_filename, first, calls)


def _take(function: Any, old: _Source, text: str, target: str, calls: tuple[_Call, ...], *, listed: bool = True) -> None:
    """Give a function this source, in which each changed statement notes that it runs."""
    if listed:
        changed = _changed_function(old, text, target)
        calls += tuple((_offset(text, point), point, place) for point, place in changed.calls)
        applied[-1].functions.append(changed)
    function.__code__ = _compile(text, function, target, calls)
    _edited[function.__code__] = _Source(text, old.file, old.first, calls)


def _changed_function(old: _Source, text: str, target: str) -> ChangedFunction:
    """What an edit changes in a function, at the lines of its file."""
    before, now = _definition(old.text, target), _definition(text, target)
    package = old.file.rfind(f"/{target.partition('.')[0]}/")
    file = old.file[package + 1 :] if package >= 0 else old.file
    same = ast.dump(before) == ast.dump(now)  # an edit that changes nothing
    points = entry(now) if same else changed_points(before, now)
    lines = tuple(replace(point, line=point.line + old.first - 1) for point in points)
    places = ChangedFunction(target, 0, points=lines).of_file(file).places
    return ChangedFunction(target, now.lineno, False, points, tuple(f"{place} ({applied[-1].name})" for place in places))


def _definition(source: str, target: str, *, documented: bool = False) -> ast.FunctionDef:
    """The function in a source, without its docstring unless `documented`. Raises PatchFailed."""
    try:
        definition = ast.parse(source).body[0]
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise PatchFailed(f"{target}: the edited source does not parse: {error.msg} at {line!r}") from error
    if not isinstance(definition, ast.FunctionDef):
        raise PatchFailed(f"{target}: not a plain function")
    if not documented and ast.get_docstring(definition) is not None:
        del definition.body[0]
    return definition


def _offset(source: str, point: Point) -> int:
    """Where a point begins in a source: nothing but blanks stands before a statement, or ASCII."""
    lines = source.split("\n")
    return sum(len(line) + 1 for line in lines[: point.line - 1]) + point.column


def source_of(function: Any) -> str:
    """The source of a function as it stands, edits included, without the indentation of its def."""
    return _source(function).text


def _called(target: str) -> str:
    return TITLES.get(target.partition(".")[0], "engine")


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
    raise PatchFailed(f"{target} does not exist in this {_called(target)}")


def _compile(source: str, function: Callable[..., Any], target: str, calls: tuple[_Call, ...] = (), file: str = "") -> Any:
    """Code object of the edited function. Free variables (`__class__` of a method that calls super()) are kept. The statements
    at these places of the source note that they ran. file: what a traceback calls it; "": that it is patched."""
    definition = _definition(source, target, documented=True)
    tree = ast.Module([definition], [])
    definition.decorator_list = []  # they wrapped the original, and still do
    blocks = own_loader.blocks_of_edit(definition, function)
    add_calls(tree, [(_move_point(point, source, place), text) for place, point, text in calls], CALL)
    for body, line, documented in blocks:
        own_loader.note(body, line, documented=documented)
    note = ast.parse(f"import {__name__} as _patches\n_patches.ran.add({target!r})\n{CALL} = _patches.executed.add").body
    after = ast.get_docstring(definition) is not None
    definition.body[after:after] = note if calls else note[:2]
    free = function.__code__.co_freevars
    if free:
        maker = ast.parse(f"def _maker({', '.join(free)}):\n    pass").body[0]
        assert isinstance(maker, ast.FunctionDef)
        maker.body = [definition]
        tree.body = [maker]
    try:
        code = compile(ast.fix_missing_locations(tree), file or f"<{target}, patched>", "exec")
    except SyntaxError as error:  # one that the parser does not see
        raise PatchFailed(f"{target}: the edited source does not compile: {error.msg}") from error
    return _find_code(code, function.__name__)


def _move_point(point: Point, source: str, place: int) -> Point:
    """A point that now begins at this place of the source: edits after its own may have moved it."""
    line = source.count("\n", 0, place)
    return replace(point, line=line + 1, column=place - (source.rfind("\n", 0, place) + 1))


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
