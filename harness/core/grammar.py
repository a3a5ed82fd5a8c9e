"""What a case's grammar is about: the text of each token, the grammar's rules, and the same as an engine reads them.

A token's text is one of few short words, by its number: so a grammar of a few letters says something of every token of a model,
many tokens have one text, and a text falls into tokens in several ways, as in a real vocabulary. Tokens of the last kind have
no text: they end a text. A mask has a bit a token in words of 32, and tokens at one place of two words next to each other have
different texts: else whoever reads the wrong word would read the right bit.
"""

from functools import cache

from .case import Case, Grammar, Request

Symbol = str | int  # a letter, or the number of a rule
Alternative = tuple[Symbol, ...]

WORDS = ("a", "b", "c", "d", "ab", "ba", "cd", "")
_BITS = 32  # of a word of a mask
_LETTERS, _RULES, _TIMES = "abcd", "ABCDEFGH", "*+?"


def kind(token: int) -> int:
    """Which of WORDS the text of a token is."""
    return (token + token // _BITS) % len(WORDS)


def word(token: int) -> str:
    """The text of a token; empty of one that ends a text."""
    return WORDS[kind(token)]


def tokenize_letters(letters: str) -> list[int]:
    """The one way in which a tokenizer writes letters: the longest text that fits comes first, as its first token."""
    found = list[int]()
    while letters:
        longest = max((own for own in WORDS if own and letters.startswith(own)), key=len)
        found.append(WORDS.index(longest))  # the token of this number has this text
        letters = letters[len(longest) :]
    return found


def writes(grammar: Grammar) -> list[int]:
    """Tokens with which a tokenizer may write texts of a grammar, by the letters that it has."""
    letters = {letter for rule in grammar.rules for letter in rule if letter in _LETTERS}
    return [token for token, own in enumerate(WORDS) if own and letters.issuperset(own)]


def ends(vocabulary: int) -> list[int]:
    """Tokens that end a text."""
    return [token for token in range(vocabulary) if not word(token)]


def aborted_unread(case: Case, request: Request) -> bool:
    """Whether a request is aborted before the scheduler has read its grammar, which it does in the first iteration after its
    arrival that is not in a pause. The engine then has it prefill a token of its own invention, and nothing of its prompt."""
    of_request = [event for event in case.events if event.kind == "abort" and event.request == request.id]
    aborts = [event.at for event in of_request if not event.step]  # inside a step it has been read
    if request.grammar is None or not aborts:
        return False
    read, paused = request.arrive, False
    for event in case.events:
        if event.at > read and not paused:
            break
        if event.kind in ("pause", "resume"):
            paused = event.kind == "pause"
            read = max(read, event.at)
    return paused or aborts[0] <= read


@cache
def rules_of(grammar: Grammar) -> tuple[tuple[Alternative, ...], ...]:
    """Its rules, and those that its groups and repetitions stand for. Raises ValueError, saying what is wrong."""
    found = list[tuple[Alternative, ...]]([()] * len(grammar.rules))
    for number, text in enumerate(grammar.rules):
        reader = _Reader(text, found)
        found[number] = reader.alternatives()
        if reader.rest:
            raise ValueError(f"rule {_RULES[number]} goes on with {reader.rest!r} behind its end")
    named = {letter for text in grammar.rules for letter in text if letter in _RULES}
    absent = sorted(named - set(_RULES[: len(grammar.rules)]))
    if absent:
        raise ValueError(f"there is no rule {absent[0]}")
    return tuple(found)


class _Reader:
    """Reads one rule. found: all rules, to which it adds those of groups and repetitions."""

    def __init__(self, text: str, found: list[tuple[Alternative, ...]]) -> None:
        self.rest, self._found = text, found

    def alternatives(self) -> tuple[Alternative, ...]:
        read = [self._sequence()]
        while self.rest[:1] == "|":
            self.rest = self.rest[1:]
            read.append(self._sequence())
        return tuple(read)

    def _sequence(self) -> Alternative:
        symbols = list[Symbol]()
        while self.rest and self.rest[0] not in "|)":
            symbols.append(self._read_repetition(self._one()))
        return tuple(symbols)

    def _one(self) -> Symbol:
        sign, self.rest = self.rest[0], self.rest[1:]
        if sign in _LETTERS:
            return sign
        if sign in _RULES:
            return _RULES.index(sign)
        if sign != "(":
            raise ValueError(f"nothing comes before a {sign!r}")
        inside = self.alternatives()
        if self.rest[:1] != ")":
            raise ValueError("a group has no end")
        self.rest = self.rest[1:]
        return self._add_rule(*inside)

    def _read_repetition(self, symbol: Symbol) -> Symbol:
        times = self.rest[:1]
        if not times or times not in _TIMES:
            return symbol
        self.rest = self.rest[1:]
        if times == "?":
            return self._add_rule((), (symbol,))
        own = len(self._found)
        return self._add_rule((symbol,) if times == "+" else (), (symbol, own))

    def _add_rule(self, *alternatives: Alternative) -> Symbol:
        self._found.append(alternatives)
        return len(self._found) - 1


def as_ebnf(grammar: Grammar) -> str:
    """In the EBNF that the engine's backends read. Its root is a rule of its own: where a rule refers to the root, xgrammar
    0.2.8 refuses tokens of several letters that go on behind a text of it."""
    return "".join(
        ["root ::= rule0\n", *(f"{_name(number)} ::= {_to_ebnf(text)}\n" for number, text in enumerate(grammar.rules))]
    )


def _name(number: int) -> str:
    return f"rule{number}"


def _to_ebnf(text: str) -> str:
    words, nothing = [], True  # nothing: since the beginning of an alternative
    for sign in text:
        if sign in "|)" and nothing:
            words.append('""')
        words.append(f'"{sign}"' if sign in _LETTERS else _name(_RULES.index(sign)) if sign in _RULES else sign)
        nothing = sign in "(|"
    text = " ".join([*words, *(['""'] if nothing else [])])
    for times in _TIMES:
        text = text.replace(f" {times}", times)
    return text
