"""What this runtime says when a kernel does wrong: one exception per class of fault, each carrying kernel, line,
program, argument and detail as fields and as one sentence.  Nothing here decides what is a fault; memory.py and
checks.py raise these.
"""

from __future__ import annotations


class Unsupported(Exception):
    """A construct which this runtime does not execute; the launch falls back to the stock interpreter if nothing is
    stored."""


class Unshadowed(Exception):
    """This runtime has run a launch, and the stock interpreter cannot: there is nothing to compare it with."""


class KernelError(RuntimeError):
    """A kernel failed after its first store, where falling back would run its side effects twice."""


class KernelViolation(Exception):
    """Base of every fault found in a kernel.  Fields are empty strings / None where they are not known."""

    def __init__(
        self,
        detail: str,
        *,
        kernel: str = "",
        file: str = "",
        line: int = 0,
        program: tuple[int, int, int] | None = None,
        argument: str = "",
    ) -> None:
        self.detail, self.kernel, self.file, self.line = detail, kernel, file, line
        self.program, self.argument = program, argument
        where = f" at {file}:{line}" if file else ""
        who = f" in program {program}" if program is not None else ""
        what = f" argument {argument!r}:" if argument else ""
        super().__init__(f"{type(self).__name__}: kernel {kernel!r}{where}{who}:{what} {detail}")


class OutOfBounds(KernelViolation):
    """An active lane read or wrote an element which the tensor given to the kernel does not have."""


class UnregisteredAddress(OutOfBounds):
    """An active lane used a raw address which no live pool contains, although pools were registered."""


class PoisonLeak(KernelViolation):
    """A stored result depends on an undefined value: a masked-off lane without `other`, or `torch.empty` memory."""


class OrderDependence(KernelViolation):
    """Two orders of the programs of one grid store different results: a race."""


class ShadowMismatch(KernelViolation):
    """This runtime and the stock interpreter disagree about a launch: a fault of one of the two, not of the kernel."""
