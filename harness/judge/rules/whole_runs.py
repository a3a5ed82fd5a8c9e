"""Rules of whole runs: what plain decode of the same engine says of each token, what ranks agree on, and what ends a run."""

import numpy as np

from eagletwin.harness.core.records import Record
from eagletwin.harness.families import RECIPES

from ..compare import Place
from ..context import Rules
from ..request_logits import apply_request_logit_changes
from . import rule, stages

# Plain decode of the same engine, on the tokens that a greedy request was sent: the second oracle.
#
# It is asked on the request's own tokens, so a token that it would have chosen otherwise changes nothing behind it. It counts
# all that was sent before a token; verify counts what was sent before the round, by the engine's own words (request_logits.py).
# Where that makes no difference to the logits the two must choose the same token, whatever the reference says of it.

_RULE = "output.plain"


class PlainDecode(Rules):
    @rule("output.plain", "3.9", weights="yes")
    @stages("plain")
    def check_answer(self, number: int, record: Record) -> None:
        """Plain decode of the same engine, on the tokens that a greedy request was sent, has at each place the best token, by
        logits that count all that was sent before; and the request was sent the same one, but where penalties of a round
        count nothing of the round."""
        replay, request = self._replay(record), self._case.request(record.request)
        (at_end, ended), says = self._context.ended[record.request], self._trace.integers(number, "tokens")
        emitted = self._trace.integers(at_end, "tokens")
        first, place = len(request.prompt) - 1, Place(record, "finished")
        ends = RECIPES[self._case.model].end_of_sequence
        if ended.numbers["aborted"] and says and says[-1] in (*request.stop, ends):
            emitted = emitted[: len(says)]  # an abort lets a round's answer go on behind a stop token; plain decode ends there
        if len(says) != len(emitted):
            self._compare.integers(place, _RULE, [len(says)], [len(emitted)], "length as plain decode has it, request", 0)
            return
        if replay.target_rows is None or replay.tokens[first + 1 : first + 1 + len(emitted)] != emitted:
            return  # what was sent is not what was committed: output.tokens says so
        target = replay.target
        unchanged = target.logits if target.plain is None else target.plain
        counted = apply_request_logit_changes(self._case, request, replay.tokens, {}, unchanged)
        rows = slice(first, first + len(emitted))
        strict, declared = (unchanged if counted is None else counted)[rows], target.logits[rows]
        self._compare.choices(place, _RULE, strict, [[token] for token in says], lambda row, _: f"token {row} of plain decode")
        if not self._compare.on(_RULE):
            return
        for at, (plain, sent) in enumerate(zip(says, emitted, strict=True)):
            if plain == sent:
                continue
            if not np.array_equal(strict[at], declared[at]):
                self._compare.count_relaxed()
            elif not self._bounds.undecided(strict[at], plain, sent):
                why = "Plain decode of the same engine has another token here, and nothing of the round counts against one."
                self._compare.report(place, _RULE, f"output token {at}", plain, sent, why)
                return


class DPAttention(Rules):
    """Checks what a rank counts, and its idle batches. Whether all ranks count the same is ranks.py's."""

    @rule("ranks.gathered", "4", weights="no")
    @stages("gathered")
    def check_gathered(self, number: int, record: Record) -> None:
        """With DP attention all ranks run the same forwards, and each counts of every rank the tokens that it has."""
        place, counts = Place(record, "iteration"), self._trace.integers(number, "counts")
        rank = self._trace.header.engine.rank
        self._compare.integers(
            place, "ranks.gathered", [record.numbers["tokens"]], counts[rank : rank + 1], "tokens of rank", rank
        )

    @rule("ranks.idle", "4", weights="no")
    @stages("idle")
    def check_idle(self, number: int, record: Record) -> None:
        """With DP attention, a batch of no request changes no stored row but those of padding."""
        for name in sorted(record.tensors):
            slots = self._trace.integers(number, name)
            if self._compare.on("ranks.idle") and slots:
                self._compare.report(
                    Place(record, "iteration"), "ranks.idle", f"slots of {name} that changed", "none", str(slots)
                )


# Rules that no record breaks by itself: what ranks agree on (ranks.py), and what ends a run (judge.py).


@rule("ranks.agree", "4", weights="no")
def agree() -> None:
    """All ranks of a tensor-parallel worker come to the same integers: tokens, positions, slots, trees, paths, counts. All
    stages of a pipeline count the same slots, and send the same."""


@rule("kernel.memory", "5", weights="no")
def memory() -> None:
    """A kernel reads and writes only elements of the tensors it was given, and raw addresses only KV pools."""


@rule("kernel.undefined", "5", weights="no")
def undefined_memory() -> None:
    """What a kernel stores does not depend on memory or lanes that nobody defined."""


@rule("kernel.order", "5", weights="no")
def order() -> None:
    """What a kernel stores does not depend on the order of its programs."""


@rule("kernel.shadow", "5", weights="no")
def shadow() -> None:
    """The fast runtime stores what Triton's interpreter stores."""


@rule("race.order", "5", weights="no")
def streams() -> None:
    """What a stream uses, and another one wrote, it waits for; what batches share is written after all have read it."""


@rule("engine.crash", "4", weights="no")
def crash() -> None:
    """The worker survives every valid case."""


@rule("engine.hang", "4", weights="no")
def hang() -> None:
    """The worker finishes every valid case."""
