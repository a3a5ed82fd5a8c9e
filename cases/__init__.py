"""Which cases to run: the ledger of known bugs and drawn cases. Imports no engine.

`eagletwin.cases(...)` is the strategy `eagletwin.cases.strategies.cases`, or with `engine` that of what the engine runs.
"""

import sys
from types import ModuleType


class _Cases(ModuleType):
    def __call__(self, *arguments: object, **options: object) -> object:
        from .blocks import cases_on

        return cases_on(*arguments, **options)  # type: ignore[arg-type]


sys.modules[__name__].__class__ = _Cases
