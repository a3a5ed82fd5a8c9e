"""The claim of eagletwin in one case: with a wrong draft chain the tokens stay the same, and fewer drafts are accepted."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eagletwin.cases.entry import Entry
from eagletwin.harness.core.records import accept_lengths
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host

from .proof import side_run

_TOKENS, _ROUNDS = 16, 24  # that a line shows


class _Decoded(NamedTuple):
    """A request as a trace has it. tokens: its answer. drafts: how many draft tokens each round accepted."""

    tokens: tuple[int, ...]
    drafts: tuple[int, ...]


def show_claim(host: Host, entry: Entry, run: RunSpec) -> str:
    """The entry's case for the claim with its fix and without it: tokens, rounds and accepted drafts, in at most twelve lines.

    Empty if the entry has none, or if here the two sides differ in their tokens or accept the same drafts.
    """
    if entry.claim is None:
        return ""
    right, wrong = (_run(host, entry, side_run(entry, side, run)) for side in (entry.green, entry.red))
    return claim_text(right, wrong, f"{entry.id} on SGLang {host.version}")


def _run(host: Host, entry: Entry, side: RunSpec) -> Trace:
    assert entry.claim is not None
    with tempfile.TemporaryDirectory() as folder:
        return host.engine(entry.claim, side.patches, side.kernels).run(entry.claim, Path(folder))


def claim_text(right: Trace, wrong: Trace, name: str) -> str:
    """The same of two traces of a case."""
    both = [_decode(trace) for trace in (right, wrong)]
    answers, drafts = ([[one[at] for one in side.values()] for side in both] for at in (0, 1))
    if answers[0] != answers[1] or drafts[0] == drafts[1]:
        return ""
    lines = [f"{name}: the tokens are the same without the fix, and fewer drafts are accepted.", ""]
    for title, side in zip(("with the fix", "without it"), both, strict=True):
        rounds = [accepted for decoded in side.values() for accepted in decoded.drafts]
        lines += [
            f"{title}:",
            f"  tokens           {_cut([token for decoded in side.values() for token in decoded.tokens], _TOKENS)}",
            f"  accepted drafts  {_cut(rounds, _ROUNDS)} = {sum(rounds)} in {len(rounds)} rounds",
        ]
    return "\n".join([*lines, "", "No test of the output sees this. The judge names the first wrong number:", ""])


def _decode(trace: Trace) -> dict[str, _Decoded]:
    records = trace.header.records
    return {
        record.request: _Decoded(
            tuple(trace.integers(number, "tokens")), tuple(length - 1 for length in accept_lengths(records, record.request))
        )
        for number, record in enumerate(records)
        if record.stage == "finished"
    }


def _cut(numbers: Sequence[int], most: int) -> str:
    return " ".join(map(str, numbers[:most])) + (" …" if len(numbers) > most else "")
