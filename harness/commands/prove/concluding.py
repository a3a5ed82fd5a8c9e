"""However proofs end, what was proven until then is told and kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eagletwin.harness.core.errors import EXIT_INTERRUPTED, AlreadyReported


@contextmanager
def concluding(conclude: Callable[[str], None]) -> Iterator[None]:
    """Calls `conclude` once the block is over, with what its figures begin with: nothing where all was proven."""
    try:
        yield
    except KeyboardInterrupt:
        conclude("INTERRUPTED, ")
        raise AlreadyReported(EXIT_INTERRUPTED) from None
    except BaseException:
        conclude("ENDED EARLY, ")
        raise
    conclude("")
