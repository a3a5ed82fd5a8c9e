"""Which cases to run: the ledger of known bugs and drawn cases. Imports no engine.

`eagletwin.cases(...)` is the strategy `eagletwin.cases.strategies.cases`.
"""

import sys
from types import ModuleType


class _Cases(ModuleType):
    def __call__(self, *arguments: object, **options: object) -> object:
        from .strategies import cases

        return cases(*arguments, **options)  # type: ignore[arg-type]


sys.modules[__name__].__class__ = _Cases
