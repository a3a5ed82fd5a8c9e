"""The requests of a trace: each record goes to the rules that look at its stage.

compare.py says how numbers are compared, replay.py what they must be, rules/ which must be equal.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import View

from . import rules
from .compare import Findings
from .context import Context, Rules
from .replay import RequestReplay

# The order of the rules that look at one record: of two divergences at one place the first one's is the cause. Files that are
# not named here come last.
_ORDER = [
    "inputs",
    "slots",
    "grammars",
    "sampling",
    "verify",
    "events",
    "outputs",
    "logprobs",
    "messages",
    "prefix_cache",
    "cached_rows",
    "states",
]


@cache
def methods() -> list[tuple[str, type[Rules], str]]:
    """Stage, class and name of each method that a record is given to, in order."""
    names = sorted(one.name for one in iter_modules(rules.__path__))
    modules = [import_module(f"{rules.__name__}.{name}") for name in (*_ORDER, *(one for one in names if one not in _ORDER))]
    kinds = [kind for one in modules for kind in vars(one).values() if getattr(kind, "__module__", "") == one.__name__]
    own = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Rules)]
    return [
        (stage, kind, name) for kind in own for name, method in vars(kind).items() for stage in getattr(method, "stages", ())
    ]


class RequestJudge:
    """Checks the records of one trace. `without`: rules that are switched off; view: that of the replays."""

    def __init__(self, trace: Trace, replays: dict[str, RequestReplay], without: frozenset[str], view: View) -> None:
        self._context = Context(trace, replays, without, view)
        for name, one in self._context.impossible.items():
            self._context.compare.asks_the_impossible(name, one.token)
        self._checks: dict[str, list[Callable[..., None]]] = {}
        for stage, kind, name in methods():
            self._checks.setdefault(stage, []).append(getattr(self._context.of(kind), name))

    def check(self) -> Findings:
        context = self._context
        for number, record in enumerate(context.trace.header.records):
            impossible = context.impossible.get(record.request)
            behind = impossible is not None and number > impossible.number
            with context.compare.looking_at(record, context.committed(number, record), away=behind):
                for check in self._checks[record.stage]:
                    check(number, record)
        for check in self._checks["end"]:
            check()
        return context.compare.settled()
