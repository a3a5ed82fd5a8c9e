"""Which entries of the ledger a mode can show, which mode of a CPU shows one, and what is said of the others."""

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
    lacks = [" ".join(f"{option} {wanted}" for option, wanted, given in required if wanted not in ("", given))]
    lacks += ["CUDA graphs"] if needs.graphs and not mode.graphs else []
    lacks += ["--prefill-graphs"] if needs.prefill_graphs and not mode.prefill_graphs else []
    if needs.overlap is not None and needs.overlap != mode.overlap:
        lacks.append("--overlap" if needs.overlap else "--no-overlap")
    lacks += [f"--pp {needs.pp}"] if needs.pp > mode.pp else []
    words = " and ".join(filter(None, lacks))
    return f"{entry.id} is not reached in this mode: it needs {words}" if words else ""


def on_a_cpu(entry: Entry) -> Mode:
    """The mode of a CPU in which an entry shows; as it always is for one that shows in none."""
    needs = entry.needs
    if needs is None or needs.device not in ("", "cpu"):
        return CPU
    return Mode(overlap=bool(needs.overlap), pp=needs.pp)


def unreached_text(entry: Entry, mode: Mode = CPU) -> str:
    """The same as text, with what follows and what to do."""
    assert entry.needs is not None
    where = ", on a machine that has it (docs/guide/gpu.md)" if entry.needs.device else ""
    return (
        f"UNKNOWN  {unreached(entry, mode)}\n"
        "  so:  neither side was run; this says nothing about the release\n"
        f"  try: eagletwin prove {entry.id} {entry.needs.options}{where}\n"
    )
