"""The door: every program of eagletwin starts here, and none leaves by an exit code that Python chose.

Python ends with 1 when a module cannot be imported, and 1 means `diverged` here: a torch whose libraries do not load, or a
package that is missing, would be blamed on SGLang, or by `git bisect run` on a commit. So this file imports the standard
library alone. `enter` imports the rest, and every failure to do so is a harness error (docs/reference/exit-codes.md).

    eagletwin, python -m eagletwin                      main
    repro.py of a run folder                            reproduce
"""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

# The same as in eagletwin.harness.core.errors, which this file must not import: it lies behind what may be broken.
HARNESS, INTERRUPTED, PIPE = 129, 130, 141


def main() -> NoReturn:
    """The command line: what the console script and `python -m eagletwin` call."""
    enter("eagletwin.harness.cli.main:main")


def reproduce(case: dict[str, Any], **how: Any) -> NoReturn:
    """What a repro.py calls: run its case, and leave by the exit code of the verdict (harness/check/repro.py)."""
    enter("eagletwin.harness.check.repro:reproduce", case, **how)


def enter(path: str, *arguments: Any, **named: Any) -> NoReturn:
    """Import the function that `path` names, as MODULE:FUNCTION, call it, and end the process with the exit code it returns.

    129 if it cannot be imported, fails, or returns anything but a number; 130 if it is interrupted.
    """
    try:
        code = _called(path, arguments, named)
        _flush(sys.stdout)  # a failure as the interpreter ends would be Python's own exit code
    except BrokenPipeError:  # stdout is a pipe that nothing reads any more
        code = PIPE
    except OSError:  # a full disk
        code = HARNESS
    _leave(code)


def _called(path: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
    module, _, name = path.partition(":")
    try:
        function: Callable[..., object] = getattr(importlib.import_module(module), name)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:  # also SystemExit: a module that ends the process while it is imported compared nothing
        _say(f"error: eagletwin cannot be imported: {type(error).__name__}: {error}\n{remedy(error)}")
        return HARNESS
    try:
        code = function(*arguments, **named)
    except SystemExit as stop:
        code = stop.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException:
        _say(traceback.format_exc() + "error: eagletwin itself failed; this is a bug in it, and says nothing about the engine")
        return HARNESS
    if type(code) is int:
        return code
    _say(f"error: {path} ended without an exit code; this is a bug in eagletwin, and says nothing about the engine")
    return HARNESS


def remedy(error: BaseException) -> str:
    """Consequence and remedy of an import that failed, for a person to read."""
    if isinstance(error, ModuleNotFoundError):
        what = f"install {error.name or 'what is missing'} into the environment of {sys.executable}, or use another Python"
    else:
        what = f"repair the environment of {sys.executable}; the last lines of the traceback: {_last_frames(error)}"
    return f"  so:  nothing was run\n  try: {what}"


def _last_frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    return ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)


def _say(text: str) -> None:
    """To stderr, where there is one: a stderr that is closed must not change the exit code."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _silence("stderr")


def _flush(stream: Any) -> None:
    if stream is not None:
        stream.flush()


def _leave(code: int) -> NoReturn:
    """End the process. What cannot be written any more is given up, so that Python does not end it by a code of its own."""
    for name in ("stdout", "stderr"):
        try:
            _flush(getattr(sys, name))
        except (OSError, ValueError):
            _silence(name)
    sys.exit(code)


def _silence(name: str) -> None:
    setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for the interpreter to flush into as it ends
