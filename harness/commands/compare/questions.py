"""What both sides are asked: generated cases, the same for the same seed, and entries of the ledger as the tree is.

The generated cases are drawn once, before anything runs, so that what one side shows changes nothing that the other is asked.
Each kind has one engine configuration. Kinds whose live bugs show in nearly every case are drawn without what triggers these: a
case that diverges on both sides says little of a change.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hypothesis.strategies import SearchStrategy
from msgspec.structs import replace

from eagletwin.cases.drawn import drawn, shrink
from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import ledger_of
from eagletwin.cases.reach import unreached
from eagletwin.cases.strategies import TOPKS, VALUES, Focus, cases, focus_of
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.dtype import WIDEST
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.mode import Mode
from eagletwin.harness.core.verdict import DECLARED_VIEW, View
from eagletwin.harness.families import RECIPES

STEPS = (3, 2, 4, 5)  # of a draft with one layer: two steps or more, so that each kind has draft decode
_SIMPLEST = 4  # Hypothesis begins with the simplest cases, which have one token and no round


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of generated case. tree: whether its verify trees have branches."""

    name: str
    model: str
    tree: bool = False


# In the order in which a short list has them.
_KINDS = (
    _Kind("chain", "llama-tiny"),
    _Kind("tree", "llama-tiny", tree=True),
    _Kind("eagle3-chain", "llama-eagle3"),
    _Kind("layers", "llama-mtp"),
    _Kind("plain-draft", "llama-standalone"),
    _Kind("eagle3-tree", "llama-eagle3-full", tree=True),
    _Kind("gqa-chain", "llama-gqa"),
    _Kind("layers-chained", "llama-mtp-chain"),
)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A list of generated cases of one kind, which is the same whenever it is drawn."""

    kind: _Kind
    share: int
    seed: int
    widest: int

    def cases(self) -> list[Case]:
        return [self._finished(case) for case in drawn(*self._draws)[-self.share :]]

    def shrink(self, case: Case, shows: Callable[[Case], bool]) -> None:
        """Ask of cases smaller than this one of the list whether each `shows` the same, as cases.drawn.shrink does."""
        shrink(
            *self._draws,
            lambda one: self._finished(one) == replace(case, name=one.name),
            lambda one: shows(self._finished(one)),
        )

    @property
    def _draws(self) -> tuple[SearchStrategy[Case], int, int]:
        return cases(_focus(self.kind, self.seed, self.widest), held=tuple(VALUES)), self.share + _SIMPLEST, self.seed

    def _finished(self, case: Case) -> Case:
        # at a chunk's end drafts of several layers are wrong in all releases (ledger entries multi-layer-chunk-tail)
        return replace(case, chunks=()) if RECIPES[self.kind.model].mtp_layers else case


@dataclass(frozen=True, slots=True)
class Question:
    """A case that both sides run, how it is judged, and the entry that it belongs to; None: it was generated.

    drawing  of a generated case: the list that it is of
    """

    name: str
    case: Case
    view: View = DECLARED_VIEW
    entry: Entry | None = None
    drawing: Drawing | None = None

    @property
    def shape(self) -> str:
        return "tree" if self.case.topk > 1 else "chain"


def generated(count: int, seed: int, mode: Mode) -> list[Question]:
    """So many cases, kind after kind, so that those of one engine follow each other."""
    found = []
    for number, kind in enumerate(_KINDS):
        share = count // len(_KINDS) + (number < count % len(_KINDS))
        if share:
            found += list(_of_kind(kind, share, seed * 7919 + number, WIDEST[mode.dtype]))
    return found


def _of_kind(kind: _Kind, share: int, seed: int, widest: int) -> Iterator[Question]:
    drawing = Drawing(kind, share, seed, widest)
    view: View = DECLARED_VIEW if RECIPES[kind.model].reads_states else "shifted"
    for number, case in enumerate(drawing.cases(), 1):
        name = f"{kind.name}-{number}"
        yield Question(name, replace(case, name=name), view, drawing=drawing)


def _focus(kind: _Kind, seed: int, widest: int) -> Focus:
    recipe = RECIPES[kind.model]
    wide = TOPKS[1 + seed % (len(TOPKS) - 1)] if kind.tree else TOPKS[0]
    held = {"model": kind.model, "topk": min(widest, wide)}
    if not recipe.mtp_layers:
        held["num_steps"] = STEPS[seed % len(STEPS)]
    if not recipe.reads_states:  # its prefix cache is keyed wrongly in all releases (ledger entry standalone-keys)
        held["radix_cache"] = False
    return focus_of(seed, widest, **held)


def entries_named(names: Sequence[str]) -> list[Entry]:
    """The entries that `--ledger` names: none, all, or by their ids. Raises InputError."""
    if "none" not in names:
        return ledger_of(list(names))
    if len(set(names)) > 1:
        raise InputError(
            "--ledger none, and other entries as well",
            consequence="nothing was run",
            remedy="leave out either",
        )
    return []


def asked_of_ledger(entries: Sequence[Entry], mode: Mode) -> list[Question]:
    """The entries that the mode reaches, each once, in the view in which the entry's bug is a divergence."""
    once = {entry.id: entry for entry in entries if not unreached(entry, mode)}
    return [Question(entry.id, entry.case, entry.red.view, entry) for entry in once.values()]
