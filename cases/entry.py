"""The form of a ledger entry: what a known bug is, the smallest case that shows it, and how to have it with and without."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from eagletwin.harness.case import Case
from eagletwin.harness.patch import Patch
from eagletwin.harness.verdict import DECLARED_VIEW, View


@dataclass(frozen=True, slots=True)
class Side:
    """One half of a proof: what is changed in the release, and what its trees are held to."""

    patches: tuple[Patch, ...] = ()
    view: View = DECLARED_VIEW


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the mode of a run must have for a bug to be there at all: without it both sides are the same.

    graphs   whether it takes CUDA graphs, which a GPU has unless it is told otherwise
    steady   an option that the bug does not need, but the proof: without it another rule may be the first to break
    """

    device: str
    dtype: str
    attention: str
    graphs: bool
    steady: str = ""

    @property
    def options(self) -> str:
        """What to type for a proof."""
        return f"--device {self.device} --dtype {self.dtype} --attention {self.attention} {self.steady}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One known bug.

    id        the number of the pull request that fixed it, with the part of it that is meant; a live one that has none: a word
    rule      the rule that the case breaks
    buggy     releases that have the bug; fixed: the first without it, or "" of one that is live
    last_bad  the last release before `fixed`, if the case shows the bug there; else `hidden` says why it cannot
    by_hand   what builds a worker on `last_bad` that the release itself would not, so that the bug can show
    beside    release -> what repairs another bug of it that would show first
    trigger   what a run needs for the bug to matter
    needs     what the mode must have, where the CPU engine as it always is does not reach the bug
    case      minimal: equal on the green side, diverged on the red one

    One of these tells the two sides apart:

    revert    undoes the fix on a current SGLang, in memory
    remedy    of a live bug: a candidate fix
    view      of a live bug that the judge declares and follows: the view in which it is a divergence
    """

    id: str
    title: str
    rule: str
    buggy: str
    fixed: str
    trigger: str
    case: Case
    last_bad: str = ""
    hidden: str = ""
    by_hand: Patch | None = None
    beside: Mapping[str, Patch] = field(default_factory=dict)
    needs: Needs | None = None
    revert: Patch | None = None
    remedy: Patch | None = None
    view: View | None = None

    def __post_init__(self) -> None:
        if sum(part is not None for part in (self.revert, self.remedy, self.view)) != 1:
            raise ValueError(f"{self.id}: exactly one of revert, remedy and view tells its two sides apart")
        if bool(self.fixed) != (bool(self.last_bad) ^ bool(self.hidden)):
            raise ValueError(
                f"{self.id}: a fixed one has a last release that shows it, or a reason why none does; a live one none"
            )

    @property
    def green(self) -> Side:
        return Side((self.remedy,)) if self.remedy is not None else Side()

    @property
    def red(self) -> Side:
        return Side((self.revert,) if self.revert is not None else (), self.view or DECLARED_VIEW)

    def says(self, side: Side) -> str:
        """What a side is, in words."""
        if self.view is not None:
            return "as the judge declares it" if side == self.green else "as it should be"
        if self.revert is not None:
            return "with the fix, as released" if side == self.green else "without the fix, which is undone in memory"
        return "with a candidate fix, in memory" if side == self.green else "as released"

    def command(self, side: Side, sglang: str = "") -> str:
        """What to type to see one side, on the SGLang of that name."""
        words = [f"eagletwin check {self.id}"]
        words += [f"--revert {self.id}"] if self.revert in side.patches else []
        words += [f"--remedy {self.id}"] if self.remedy in side.patches else []
        words += [f"--view {side.view}"] if side.view != DECLARED_VIEW else []
        words += [f"--sglang {shlex.quote(sglang)}"] if sglang else []
        return " ".join(words)
