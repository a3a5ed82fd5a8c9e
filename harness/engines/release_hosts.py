"""One release after another, each in a process of its own; the next is imported while the last is asked."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from .host import Host
from .provision import NotFetched
from .source import resolve
from .start import Zygote


def hosts(names: Sequence[str]) -> Iterator[tuple[str, Host | NotFetched]]:
    """(release, its host, or why it cannot be had), in this order. A host is closed when the next is asked for."""
    started: dict[str, Zygote | NotFetched] = {}
    with _closing(started):
        for number, name in enumerate(names):
            for ahead in names[number : number + 2]:
                if ahead not in started:
                    started[ahead] = _start(ahead)
            zygote = started.pop(name)
            if isinstance(zygote, NotFetched):
                yield name, zygote
                continue
            with Host(zygote) as host:
                yield name, host


def _start(name: str) -> Zygote | NotFetched:
    try:
        zygote = Zygote(resolve(name))
    except NotFetched as error:
        return error
    zygote.start()
    return zygote


@contextmanager
def _closing(started: dict[str, Zygote | NotFetched]) -> Iterator[None]:
    """Whatever stops the caller, no process outlives it."""
    with ExitStack() as stack:

        def close() -> None:
            for zygote in started.values():
                if isinstance(zygote, Zygote):
                    zygote.close()

        stack.callback(close)
        yield
