"""`--json`: the result of a command as one JSON object, alone on stdout, whatever becomes of the command.

A command is decorated with `with_json` and hands its result to `tell_result`. What a person reads then goes to stderr. Where a
command ends without a result, as where SGLang would not start, the object has what it said; where it raises, the object has the
error (`print_error`, for every command). docs/reference/json.md has the fields of all.
"""

import contextlib
import inspect
import io
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Annotated, Any

import msgspec
import typer

from eagletwin.harness.core.errors import EXIT_HARNESS, EXIT_INTERRUPTED, AlreadyReported, EagletwinError

from .options import OUTPUT
from .result import ErrorFacts, FailedFacts, ResultFacts, SaidFacts

Command = Callable[..., object]
AsJson = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="As JSON, for programs.")]

_told: ContextVar[list[ResultFacts] | None] = ContextVar("told", default=None)  # None: nobody asked for JSON


def wants_json() -> bool:
    """Whether the command that runs was asked for JSON."""
    return _told.get() is not None


def tell_result(result: ResultFacts) -> None:
    """The result of the command that runs; the last one counts. Without --json nothing comes of it."""
    told = _told.get()
    if told is not None:
        told[:] = [result]


def with_json(command: Command) -> Command:
    """Give a command `--json`."""
    parameters = list(inspect.signature(command).parameters.values())
    keyword = inspect.Parameter.KEYWORD_ONLY

    @wraps(command)
    def typed(*args: Any, as_json: bool = False, **kwargs: Any) -> object:
        return _printed(lambda: command(*args, **kwargs)) if as_json else command(*args, **kwargs)

    parameters = [one.replace(kind=keyword) for one in parameters]
    parameters.append(inspect.Parameter("as_json", keyword, default=False, annotation=AsJson))
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    typed.__annotations__ = {one.name: one.annotation for one in parameters}
    return typed


def _printed(run: Callable[[], object]) -> object:
    """What `run` returns, after its result was printed."""
    told, said = list[ResultFacts](), _Aside()
    token = _told.set(told)
    try:
        with contextlib.redirect_stdout(said):
            code = run()
    except AlreadyReported as end:
        _print(told, end.exit_code, said.getvalue())
        raise
    finally:
        _told.reset(token)
    if type(code) is int:
        _print(told, code, said.getvalue())
    return code


def _print(told: list[ResultFacts], code: int, said: str) -> None:
    result = told[0] if told else SaidFacts(said=said.strip())
    result.exit_code = code
    print_object(result)


def print_object(facts: object) -> None:
    """One JSON value on stdout."""
    print(msgspec.json.format(msgspec.json.encode(facts), indent=1).decode(), flush=True)


def print_error(error: BaseException) -> None:
    """What a program reads in place of a result."""
    if isinstance(error, AlreadyReported):
        return
    if isinstance(error, EagletwinError):
        failure = ErrorFacts(cause=error.cause, consequence=error.consequence, remedy=error.remedy)
        print_object(FailedFacts(exit_code=error.exit_code, error=failure))
        return
    ended = isinstance(error, KeyboardInterrupt)
    cause = "the command was ended" if ended else f"{type(error).__name__}: {error}"
    failure = ErrorFacts(cause=cause, consequence="there is no result", remedy="see stderr")
    print_object(FailedFacts(exit_code=EXIT_INTERRUPTED if ended else EXIT_HARNESS, error=failure))


class _Aside(io.StringIO):
    """What a person reads: on stderr, and kept for a command that ends without a result."""

    def write(self, text: str) -> int:
        sys.stderr.write(text)
        return super().write(text)

    def flush(self) -> None:
        sys.stderr.flush()
