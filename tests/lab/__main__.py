"""`python -m tests.lab COMMAND`, from a checkout: what measures eagletwin itself, and is no part of the package.

Exit codes are the product's: 0 measured, 1 a figure misses its aim, 125 something could not be measured, 128 and more an error.
"""

import sys
from typing import Any

import typer

from eagletwin.harness.core.errors import InputError, run_guarded

from .bench.command import rate, reached, search, speed
from .bundle.command import bundle
from .coverage import coverage
from .draws.command import draws
from .faults import faults
from .gpu.command import gpu
from .models.command import models
from .mutants.command import mutants, oracle
from .releases.command import releases
from .serve import serve
from .train.command import train

HELP = "Measure eagletwin itself, and make what its tests and records need."
app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Measure eagletwin itself, and make what its tests and records need.",
)
for command in (rate, speed, search, reached, coverage, faults, mutants, oracle, draws, releases, models, train, serve, bundle):
    app.command()(command)
app.add_typer(gpu, name="gpu")


def run(words: list[str]) -> Any:
    """Run a command, and return its exit code. Raises InputError for words that it does not take."""
    try:
        return typer.main.get_command(app)(words, prog_name="python -m tests.lab", standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        raise InputError(error.format_message(), consequence="nothing was run", remedy="python -m tests.lab --help") from error


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: run(sys.argv[1:])))
