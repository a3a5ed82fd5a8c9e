"""How this Python runs a module of eagletwin in a process of its own, which imports nothing from the current folder."""

import sys

# `-P` keeps the current folder off sys.path. Python 3.10 lacks it: there a line takes the folder away before any import.
_BEFORE_3_11 = "import sys; del sys.path[0], sys.argv[0]; import runpy; runpy.run_module(sys.argv[0], None, '__main__', True)"

# A command line goes on with the module's name and its arguments.
RUN_MODULE: tuple[str, ...] = (sys.executable, *(("-P", "-m") if sys.version_info >= (3, 11) else ("-c", _BEFORE_3_11)))
