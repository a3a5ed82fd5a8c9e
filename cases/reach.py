"""Which entries of the ledger a run in a mode can show at all, and what is said of the others."""

from eagletwin.harness.core.mode import CPU, Mode

from .entry import Entry


def unreached(entry: Entry, mode: Mode = CPU) -> str:
    """Why both sides of an entry are the same in this mode; empty if they are not."""
    needs = entry.needs
    if needs is None:
        return ""
    required = (
        ("--device", needs.device, mode.device),
        ("--dtype", needs.dtype, mode.dtype),
        ("--attention", needs.attention, mode.attention),
    )
    lacks = [" ".join(f"{option} {wanted}" for option, wanted, given in required if wanted != given)]
    lacks += ["CUDA graphs"] if needs.graphs and not mode.graphs else []
    if needs.overlap is not None and needs.overlap != mode.overlap:
        lacks.append("--overlap" if needs.overlap else "--no-overlap")
    words = " and ".join(filter(None, lacks))
    return f"{entry.id} is not reached in this mode: it needs {words}" if words else ""


def unreached_text(entry: Entry, mode: Mode = CPU) -> str:
    """The same as text, with what follows and what to do."""
    assert entry.needs is not None
    return (
        f"UNKNOWN  {unreached(entry, mode)}\n"
        "  so:  neither side was run; this says nothing about the release\n"
        f"  try: eagletwin prove {entry.id} {entry.needs.options}, on a machine that has it (docs/guide/gpu.md)\n"
    )
