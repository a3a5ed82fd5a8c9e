"""However proofs end, what was proven until then is told and kept."""

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING

from eagletwin.harness.core.errors import EXIT_INTERRUPTED, AlreadyReported

if TYPE_CHECKING:
    from .proof import NoProof, Proof, WheelProof


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


def proven_text(proofs: "Sequence[Proof | NoProof | WheelProof]", asked: Sized, early: str, seconds: float) -> str:
    """How many hold. early: as `concluding` says it; then not all that were asked were proven."""
    of = f"{len(proofs)}{f' of {len(asked)} asked' * bool(early)}"
    return f"{early}{sum(proof.holds for proof in proofs)} of {of} proven in {seconds:.1f} s"
