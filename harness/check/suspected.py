"""The bugs that one wrong case may show, and which of them it does: those whose remedies it needs to be right."""

from collections.abc import Callable, Collection, Sequence

from eagletwin.cases.entry import Entry

from .fewest import fewest
from .trials import Trial


class Suspected:
    """apt: the bugs, whose remedies fit together. rule: what the case breaks with none of them. look: runs it with some.
    told: ids of those that explained a case like it, which are asked first.

    Of bugs with one remedy the first stands for all until they are named.
    """

    def __init__(
        self, apt: Sequence[Entry], rule: str, look: Callable[[tuple[Entry, ...]], Trial], told: Collection[str] = ()
    ) -> None:
        self._alike = {entry.id: [one for one in apt if one.remedy == entry.remedy] for entry in apt}
        self._first = [entry for entry in apt if entry is self._alike[entry.id][0]]
        self._rule, self._look = rule, look
        self._told = [entry.id for entry in self._first if any(one.id in told for one in self._alike[entry.id])]

    def alone(self) -> tuple[str, ...]:
        """One of those that break the rule, if its remedy is enough; it is with most cases."""
        breaking = [entry.id for entry in self._first if self._breaks(entry)]
        if len(self._told) == 1:
            breaking.sort(key=lambda name: name not in self._told)
        return next(((name,) for name in breaking if self._with((name,)).clean), ())

    def again(self) -> tuple[str, ...]:
        """The fewest of several that were told, if those are enough."""
        if len(self._told) < 2 or not self._with(self._told).clean:
            return ()
        return fewest(self._told, lambda names: self._with(names).clean)

    def together(self) -> tuple[str, ...]:
        """The fewest whose remedies are enough, where those of all are: those that break the rule before others."""
        likely = sorted(self._first, key=lambda entry: not self._breaks(entry))
        return fewest([entry.id for entry in likely], lambda names: self._with(names).clean)

    def named(self, names: Sequence[str]) -> tuple[Entry, ...]:
        """These as entries: of bugs with one remedy that whose rule is broken without it."""
        named = list[Entry]()
        for entry in (entry for entry in self._first if entry.id in names):
            others = [name for name in names if name != entry.id]
            alike = self._alike[entry.id]
            shown = self._with(others).verdict.rule if others and len(alike) > 1 else self._rule
            named.append(next((one for one in alike if one.rule == shown), entry))
        return tuple(named)

    def _breaks(self, entry: Entry) -> bool:
        return any(one.rule == self._rule for one in self._alike[entry.id])

    def _with(self, names: Collection[str]) -> Trial:
        return self._look(tuple(entry for entry in self._first if entry.id in names))
