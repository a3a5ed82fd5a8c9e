"""eagletwin: a slow, obvious reference of the EAGLE draft chain beside SGLang's real workers.

The public names are `Case`, `cases`, `check` and `judge`; everything else may change without notice.
The three folders beside this file are links to the ones at the top of the checkout (docs/explanation/decisions.md).
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Case", "cases", "check", "judge"]

if TYPE_CHECKING:
    from eagletwin.cases.strategies import cases
    from eagletwin.harness.check.trials import check
    from eagletwin.harness.core.case import Case
    from eagletwin.harness.judge.judge import judge

# Imported where they are first used: the command line and pytest's plugin must start without torch.
_HOMES = {"Case": "harness.core.case", "check": "harness.check.trials", "judge": "harness.judge.judge"}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "cases":  # the package, which is the strategy when it is called
        return import_module(f"{__name__}.cases")
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
