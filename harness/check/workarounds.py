"""Which workarounds a finding needs: candidate fixes of known bugs without which its case shows something else."""

from collections.abc import Callable, Sequence
from functools import cache

from eagletwin.harness.core.verdict import View
from eagletwin.harness.engines.host import PatchDoesNotApply, WouldNotStart

from .confirm import signature
from .known import Mends, entries_of, fewest
from .trials import Trial

Names = tuple[str, ...]


def needed(
    names: Names,
    found: Trial,
    look: Callable[[Names], Trial],
    *,
    fixed: Callable[[Names, Trial], bool] = lambda names, trial: True,
    enough: Names = (),
) -> Names:
    """The fewest of these workarounds with which a case first diverges in the same number, and by as much, as with all of them.

    found   the case with all of them; look: the case with some
    fixed   whether it would be right with these, which show that trial, if the finding were fixed
    enough  those that a larger case needed: tried before all
    """

    @cache
    def shows(some: Names) -> bool:
        try:
            trial = look(some)
        except (WouldNotStart, PatchDoesNotApply):
            return False
        alike = trial.signature == found.signature and signature(trial.verdict) == signature(found.verdict)
        return alike and fixed(some, trial)

    def clean(some: Sequence[str]) -> bool:
        return shows(tuple(some))

    if not names or clean(()):
        return ()
    return fewest(enough if enough and clean(enough) else names, clean)


def needed_in(mends: Mends, alone: Trial, names: Names, view: View, *, last: bool = True, enough: Names = ()) -> Names:
    """The same on the SGLang of `mends`. alone: the case with all, in a process of its own.

    last  no smaller case is made: then the case is also to be right with them once the finding is fixed. The base says so, if
          it is right with all; else as many numbers are to diverge after the first as with all.
    """

    def right(some: Names) -> bool:
        return mends.right_in_base(alone.case, entries_of(some), view)

    def fixed(some: Names, trial: Trial) -> bool:
        if not last or right(some):
            return True
        return not right(names) and trial.verdict.later == alone.verdict.later

    def look(some: Names) -> Trial:
        return mends.trials(entries_of(some), view).look_alone(alone.case)

    return needed(names, alone, look, fixed=fixed, enough=enough)
