"""This Python: what is installed, and how it runs a module in a process of its own. Light: it imports nothing that it names."""

import importlib.metadata
import sys

# What is installed here. Light: it imports nothing that it names.

ABSENT = "none"


def installed(package: str) -> str:
    """Version of an installed package; ABSENT if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


# How this Python runs a module of eagletwin in a process of its own, which imports nothing from the current folder.

# `-P` keeps the current folder off sys.path. Python 3.10 lacks it: there a line takes the folder away before any import.
_BEFORE_3_11 = "import sys; del sys.path[0], sys.argv[0]; import runpy; runpy.run_module(sys.argv[0], None, '__main__', True)"

# A command line goes on with the module's name and its arguments.
RUN_MODULE: tuple[str, ...] = (sys.executable, *(("-P", "-m") if sys.version_info >= (3, 11) else ("-c", _BEFORE_3_11)))
