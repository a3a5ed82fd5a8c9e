"""Numbers in what is printed: 1 case, 2 cases; once, 3 times."""

import difflib
import signal
from collections.abc import Iterable, Mapping

from .verdict import RequestShare

_FEW = 12


def nearest(name: object, known: Iterable[object], listed: str = "") -> str:
    """The remedy for a name that is not known: the names most like it; all of them where they are few, or none is like it.

    listed: the command or page that lists all"""
    names = [str(one) for one in known]
    near = difflib.get_close_matches(str(name), names, 3, 0.5)
    if near and len(names) > _FEW:
        return f"did you mean {' or '.join(near)}?" + (f" {listed} lists all" if listed else "")
    return f"{listed} lists them" if listed and len(names) > _FEW else f"use one of {', '.join(names)}"


def count(number: int, word: str) -> str:
    """So many of a thing whose plural ends in s."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def how_it_ended(code: int) -> str:
    """A process, by its exit code: negative, if a signal did it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def asked_the_impossible(tokens: Mapping[str, int]) -> str:
    """From where on requests are not judged that ask for what cannot be. tokens: see Verdict.impossible."""
    return " and ".join(f"request {name} from its output token {token} on" for name, token in tokens.items())


def compared_in_part(shares: Mapping[str, RequestShare]) -> str:
    """Of each request of which not everything was compared, how much was; empty: of all, everything."""
    return "; ".join(f"request {name}, {share}" for name, share in shares.items() if str(share))


def others_in_plain_decode(tokens: int) -> str:
    """What is said of tokens that differ from those of plain decode as SGLang declares."""
    ours = "1 token is not the one" if tokens == 1 else f"{tokens} tokens are not those"
    return f"{ours} that plain decode sends: in verify SGLang's penalties do not count the tokens of the same round."
