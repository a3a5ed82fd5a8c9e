"""One run: on which SGLang a case runs, how it is driven, what is changed in it, and how it is judged.

Everything that names a run is derived from a RunSpec: the options that a person types to have it again, the reproduction
script, what a search hands to an engine. Imports nothing slow.
"""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from .errors import EXIT_UNKNOWN, exit_code_of
from .mode import CPU, Mode
from .patch import Patch
from .verdict import DECLARED_VIEW, Verdict, View

# What executes Triton kernels: the fast runtime; Triton's interpreter; both, compared launch by launch; the fast runtime
# three times a launch, to find undefined values and races.
Kernels = Literal["fast", "interpreter", "shadow", "checked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds. A step is one stage of one scheduler iteration: under the interpreter some 0.1 to 1 s on an idle machine."""

    step: float = 120.0
    case: float = 900.0


DEFAULT_LIMITS = Limits()


class RunSpec(Struct, frozen=True, kw_only=True):
    """One run, whatever the case.

    sglang   what `--sglang` named: "" for the installed one, a release, or a folder
    patches  changes in memory; `changes`: the options that give them, such as ("--revert", "26329"), as far as options can
    workarounds  candidate fixes of known bugs, which keep these out of a case that is about something else: one that nothing
             calls is no doubt about the verdict, as a patch would be
    finding  of a reproduction: the signature of the finding. The case is to show whether it is still there: a tree's other
             changes need not run
    without  rules that are switched off
    view     what counts as right where SGLang is known to approximate
    repeat   how many times a case is run before it is called equal
    strict   whether an equal run that did not run all of a change counts as unknown
    """

    sglang: str = ""
    mode: Mode = CPU
    kernels: Kernels = "fast"
    patches: tuple[Patch, ...] = ()
    workarounds: tuple[Patch, ...] = ()
    finding: str = ""
    changes: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()
    view: View = DECLARED_VIEW
    limits: Limits = DEFAULT_LIMITS
    repeat: int = 1
    strict: bool = False

    @property
    def applied(self) -> tuple[Patch, ...]:
        """All changes in memory."""
        return tuple(dict.fromkeys((*self.patches, *self.workarounds)))

    @property
    def options(self) -> list[str]:
        """What to type for this run; nothing for what is left at its default."""
        words = [*self.changes, *(word for rule in sorted(self.without) for word in ("--without", rule))]
        given = (
            ("--view", self.view, DECLARED_VIEW),
            ("--sglang", self.sglang, ""),
            ("--kernels", self.kernels, "fast"),
            ("--repeat", self.repeat, 1),
            ("--step-timeout", exact(self.limits.step), exact(DEFAULT_LIMITS.step)),
            ("--case-timeout", exact(self.limits.case), exact(DEFAULT_LIMITS.case)),
        )
        return [*words, *(["--strict"] if self.strict else []), *unusual(given), *self.mode.options]

    def exit_code(self, verdict: Verdict) -> int:
        """Of a command that comes to this verdict."""
        return EXIT_UNKNOWN if self.strict and verdict.not_seen else exit_code_of(verdict.status)

    def command(self, *words: object) -> str:
        """The command line that has this run: `eagletwin`, these words, and the options."""
        return shlex.join(["eagletwin", *map(str, words), *self.options])


def unusual(given: Iterable[tuple[str, object, object]]) -> list[str]:
    """What to type of these options, each (name, value, default): nothing for what is left at its default."""
    return [word for name, value, usual in given if value != usual for word in (name, str(value))]


def exact(number: float) -> str:
    """The shortest text that is read as this number: 120, and not 120.0."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


DEFAULT_RUN = RunSpec()
