"""Which texts are sentences of a context-free grammar, and which begin one: Earley's recognizer (CACM 13(2), 1970), a letter
at a time. A rule that may be empty is gone past as soon as it is predicted (Aycock and Horspool, 2002).

Nothing is compiled and nothing guessed: an item stands for a rule that is half read, and all items are kept.
"""

from typing import NamedTuple

Symbol = str | int  # a letter, or the number of a rule
Alternative = tuple[Symbol, ...]
Rules = tuple[tuple[Alternative, ...], ...]  # of each rule its alternatives; a sentence is a text of rule 0


class Item(NamedTuple):
    """An alternative of a rule of which `read` symbols are read, since the letter at `start`."""

    rule: int
    symbols: Alternative
    read: int
    start: int

    @property
    def next(self) -> Symbol | None:
        return self.symbols[self.read] if self.read < len(self.symbols) else None

    def read_on(self) -> "Item":
        return self._replace(read=self.read + 1)


def reaching(rules: Rules, *, letters: bool) -> frozenset[int]:
    """Rules that have a text at all; without letters: rules that may be empty."""
    found = frozenset[int]()
    while True:
        more = frozenset(
            number
            for number, alternatives in enumerate(rules)
            if any(all(symbol in found or (letters and isinstance(symbol, str)) for symbol in one) for one in alternatives)
        )
        if more == found:
            return found
        found = more


def left_recursive(rules: Rules) -> bool:
    """Whether a text of a rule may begin with a text of the same rule."""
    empty = reaching(rules, letters=False)
    first = [{symbol for one in alternatives for symbol in _beginning(one, empty)} for alternatives in rules]
    while True:
        further = [begun.union(*(first[rule] for rule in begun)) for begun in first]
        if further == first:
            return any(rule in begun for rule, begun in enumerate(first))
        first = further


def _beginning(symbols: Alternative, empty: frozenset[int]) -> list[int]:
    """Rules that a text of these symbols may begin with."""
    found = list[int]()
    for symbol in symbols:
        if isinstance(symbol, str):
            break
        found.append(symbol)
        if symbol not in empty:
            break
    return found


class Automaton:
    """The sentences of a grammar. What is not part of any text is left out first: then a text that can be read begins one."""

    def __init__(self, rules: Rules) -> None:
        full = reaching(rules, letters=True)
        self._rules = tuple(
            tuple(one for one in alternatives if all(isinstance(symbol, str) or symbol in full for symbol in one))
            for alternatives in rules
        )
        self._empty = reaching(self._rules, letters=False)
        first = {Item(0, symbols, 0, 0) for symbols in self._rules[0]}
        # text -> the items after each of its letters, before the first of them included
        self._read: dict[str, tuple[frozenset[Item], ...]] = {"": (self._closure(first, ()),)}

    def begins(self, text: str) -> bool:
        """Whether a sentence begins with this text, or is it."""
        return bool(self._items(text)[-1])

    def is_sentence(self, text: str) -> bool:
        return any(item.rule == 0 and item.start == 0 and item.next is None for item in self._items(text)[-1])

    def forced_text(self, text: str) -> str:
        """What each sentence that begins with this text goes on with, up to where one ends or two differ."""
        letters = ""
        while not self.is_sentence(text + letters):
            following = {item.next for item in self._items(text + letters)[-1] if isinstance(item.next, str)}
            if len(following) != 1:
                break
            letters += following.pop()
        return letters

    def _items(self, text: str) -> tuple[frozenset[Item], ...]:
        if text not in self._read:
            before = self._items(text[:-1])
            self._read[text] = (
                *before,
                self._closure({item.read_on() for item in before[-1] if item.next == text[-1]}, before),
            )
        return self._read[text]

    def _closure(self, items: set[Item], before: tuple[frozenset[Item], ...]) -> frozenset[Item]:
        """With all that follows from these items without another letter."""
        here, found, waiting = len(before), set(items), list(items)
        while waiting:
            item = waiting.pop()
            following = set[Item]()
            if isinstance(item.next, int):
                following = {Item(item.next, symbols, 0, here) for symbols in self._rules[item.next]}
                following |= {item.read_on()} if item.next in self._empty else set()
            elif item.next is None:
                awaiting = found if item.start == here else before[item.start]
                following = {other.read_on() for other in awaiting if other.next == item.rule}
            waiting += following - found
            found |= following
        return frozenset(found)
