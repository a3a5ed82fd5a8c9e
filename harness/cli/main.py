"""The command line: which commands there are (DESIGN §7). Each is a folder or a file of harness/commands/.

Exit codes fit `git bisect run`: 0 equal, 1 diverged, 125 cannot tell, 128 and more for usage and harness errors.
"""

import gc
import inspect
import io
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer

from eagletwin.harness.commands.acceptance.command import acceptance
from eagletwin.harness.commands.bisect.command import bisect
from eagletwin.harness.commands.check import check
from eagletwin.harness.commands.compare.command import compare, old_arguments
from eagletwin.harness.commands.fuzz.command import fuzz
from eagletwin.harness.commands.info import info
from eagletwin.harness.commands.judge import judge
from eagletwin.harness.commands.kernels.command import kernels
from eagletwin.harness.commands.prove.command import prove
from eagletwin.harness.commands.record import record
from eagletwin.harness.commands.result import print_error
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_INTERRUPTED, InputError, run_guarded
from eagletwin.harness.core.files import keep_bytecode
from eagletwin.harness.core.terminal import bound_columns

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run an engine's real EAGLE worker next to a slow reference, and report the first number that differs.",
    epilog="Exit codes: 0 equal, 1 diverged, 125 cannot tell, 128 and more: usage or harness error.",
)

# In --help by what people want.
CHANGE, FOUND, PAIR, MORE = "Is my change right?", "Diagnose a divergence", "A pair of checkpoints, or a server", "More"
for panel, commands in {
    CHANGE: (check, fuzz, prove, compare, kernels),
    FOUND: (bisect, judge),
    PAIR: (acceptance, record),
}.items():
    for command in commands:
        paragraphs = (inspect.getdoc(command) or "").split("\n\n")
        app.command(rich_help_panel=panel, help="\n\n".join(" ".join(lines.split()) for lines in paragraphs))(command)
app.add_typer(info, name="info", rich_help_panel=MORE)

# Old names of commands. For one release.
RENAMED = {
    "campaign": "fuzz --findings 0",
    "doctor": "info doctor",
    "ledger": "info ledger",
    "rules": "info rules",
    "models list": "info models",
    "models": "info models",
    "releases": "info releases",
    "ci": "compare",
    "diff": "compare",
    "report": "judge --html",
}
# What left the package, by its old name, and the command of a checkout that it became. For one release.
MOVED = {
    "bench": "--help",
    "train": "train",
    "releases table": "releases",
    "models table": "models",
    "gpu bundle": "bundle",
    "gpu draws": "draws",
    "gpu": "gpu",
    "serve": "serve",
}


@app.callback(invoke_without_command=True)
def top(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Run an engine's real EAGLE worker next to a slow reference, and report the first number that differs."""
    if version:
        from eagletwin import __version__

        print(f"eagletwin {__version__}")
        raise typer.Exit(EXIT_EQUAL)
    if context.invoked_subcommand is None:
        raise InputError("no command was given", consequence="nothing was run", remedy="eagletwin --help")


def main() -> int:
    """Entry point, behind eagletwin.door."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    for stream in (sys.stdout, sys.stderr):  # a tree is drawn in letters that a terminal may not have: no verdict is lost by it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    bound_columns()
    keep_bytecode()
    code = run_guarded(run_command)
    # The interpreter collects once more as it ends: 0.2 s of looking at torch, which holds nothing of ours. Triton's bindings
    # complain where it does not.
    if "triton" not in sys.modules:
        gc.freeze()
    return code


@cache
def command_tree() -> Any:
    """The commands as typer makes them of the functions, which takes some milliseconds."""
    return typer.main.get_command(app)


def must_be_given_once(arguments: Sequence[str]) -> None:
    """Raises InputError for an option that is given twice and holds one value: the last would win in silence."""
    command, words = command_tree(), list(arguments)
    while isinstance(command, typer.core.TyperGroup) and words:
        command = command.commands.get(words.pop(0), command)
    own = words[: words.index("--")] if "--" in words else words  # what follows belongs to somebody else
    for option in command.params:
        names = {*option.opts, *option.secondary_opts}
        given = [word for word in own if word.partition("=")[0] in names]
        if len(given) > 1 and isinstance(option, typer.core.TyperOption) and not (option.multiple or option.count):
            raise InputError(
                f"{' and '.join(given)}: an option that holds one value was given {len(given)} times",
                consequence="nothing was run: all but the last would have been dropped",
                remedy=f"give {option.opts[0]} once",
            )


def run_command(arguments: Sequence[str] | None = None) -> object:
    """Run the command that was typed: what it returns, which is its exit code. Help and the version end in 0."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = words[: words.index("--")] if "--" in words else words
    try:
        return _run(words)
    except BaseException as error:
        if "--json" in own:  # stdout then holds JSON whatever happens; what a person reads is printed by run_guarded()
            print_error(error)
        raise


def _begin(words: list[str], name: str) -> bool:
    """Whether what was typed begins with this name of a command."""
    return words[: len(name.split())] == name.split()


def _refuse_moved(words: list[str]) -> None:
    """Raises InputError for a command that left the package."""
    for name, new in MOVED.items():
        if _begin(words, name):
            raise InputError(
                f"`eagletwin {name}` left the package: it measures or makes what eagletwin's own tests and records need",
                consequence="nothing was run",
                remedy=f"python -m tests.lab {new}, in a checkout of eagletwin",
            )


def _replace_old_name(words: list[str]) -> list[str]:
    """The words with a command's new name, which stderr says."""
    for old, new in RENAMED.items():
        if _begin(words, old):
            rest = words[len(old.split()) :]
            now = [*new.split(), *(old_arguments(rest, old) if new == "compare" else rest)]
            said = shlex.join(["eagletwin", *now]) if new == "compare" else f"eagletwin {new}"
            print(f"note: `eagletwin {old}` is now `{said}`", file=sys.stderr)
            return now
    return words


def _run(words: list[str]) -> object:
    _refuse_moved(words)
    words = _replace_old_name(words)
    must_be_given_once(words)
    try:
        code = command_tree()(words, standalone_mode=False)
    except typer.Exit as stop:
        code = stop.exit_code
    except typer.TyperException as error:
        raise InputError(
            error.format_message(), consequence="nothing was run", remedy="eagletwin --help, or --help after a command"
        ) from error
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    if code == EXIT_INTERRUPTED:  # typer makes a return of Ctrl-C, and no JSON would be printed for it
        raise KeyboardInterrupt
    return code
