"""Adaptive numbers of draft steps: `steps.parts`, `steps.fed`, `steps.chosen`.

What the engine chose is followed (replay.py): here is judged whether it chose as its policy says, by what it was told, whether
it was told what verify decided, and whether all parts of the worker went by the same choice.
"""

from dataclasses import fields

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.records import NODES_OF, STEPS_OF, Record
from eagletwin.reference.adaptive import Knobs, Policy

from ..compare import Place
from ..context import Rules
from . import rule, stages

_PARTS, _FED, _CHOSEN = "steps.parts", "steps.fed", "steps.chosen"


class Steps(Rules):
    def begin(self) -> None:
        engine = self._trace.header.engine
        self._policy = _policy(self._case)
        self._graphs = sorted(engine.graphs)
        self._late = 1 if engine.overlap else 0  # results that may be outstanding when a batch begins
        self._verified: dict[int, list[Record]] = {}  # iteration -> the records of its verify
        for record in self._records:
            if record.stage == "verify":
                self._verified.setdefault(record.iteration, []).append(record)
        self._ran: list[int] = []  # iterations of decode batches
        self._fed = 0

    @rule("steps.chosen", "3.12", weights="no")
    @stages("steps")
    def check_choice(self, number: int, record: Record) -> None:
        """With adaptive steps a round has as many draft steps as the policy makes of the drafts accepted so far, for the size
        of its batch."""
        if self._policy is None:
            raise ValueError("a round's number of steps was recorded, and the case has no adaptive steps")
        place, batch = Place(record, "draft", step=-1), self._verified.get(record.iteration, [])
        if batch:
            due, steps = self._policy.of(self._graph_size(len(batch))).steps, self._trace.integers(number, "steps")
            self._compare.integers(place, _CHOSEN, [due], steps[:1], f"draft steps of a batch of {len(batch)}, round", 0)

    @rule("steps.parts", "3.12", weights="no")
    @stages("steps")
    def parts(self, number: int, record: Record) -> None:
        """In a round with adaptive steps every part of the worker goes by the same number of draft steps."""
        said = {"steps": self._trace.integers(number, "steps"), "nodes": self._trace.integers(number, "nodes")}
        steps = said["steps"][0]
        wrong = [
            (f"{kind} by {name}", right, value)
            for names, kind, right in ((STEPS_OF, "steps", steps), (NODES_OF, "nodes", steps + 1))
            for name, value in zip(names, said[kind], strict=True)
            if value not in (right, -1)
        ]
        if self._compare.on(_PARTS) and wrong:
            self._compare.report(Place(record, "draft", step=-1), _PARTS, *wrong[0])

    @stages("steps")
    def note_begin(self, _number: int, record: Record) -> None:
        """A decode batch begins: what the choice was told by then."""
        behind, place = len(self._ran) - self._fed, Place(record, "draft", step=-1)
        if behind > self._late and self._compare.on(_FED):
            least = f"those of {len(self._ran) - self._late} batches at least"
            self._compare.report(place, _FED, "accepted drafts that the choice was told", least, f"those of {self._fed}")
        self._ran.append(record.iteration)

    @rule("steps.fed", "3.12", weights="no", also=("steps", "flushed"))
    @stages("fed")
    def check_fed(self, number: int, record: Record) -> None:
        """The choice of steps is told the accepted drafts of each decode batch once, in order, before the next one begins; with
        overlap, before the one after that."""
        # The choice is told what a batch accepted: the first of those that it was not told of yet.
        place, told = Place(record, "iteration"), self._trace.integers(number, "correct")
        if self._fed >= len(self._ran):
            if self._compare.on(_FED):
                self._compare.report(place, _FED, "accepted drafts that the choice was told", "those of a batch", "no batch's")
        else:
            batch = self._verified.get(self._ran[self._fed], [])
            accepted = [one.numbers["accept_len"] - 1 for one in batch]
            self._compare.integers(place, _FED, accepted, told, f"accepted drafts of batch {self._fed}, request", 0)
            sizes = [len(batch)], [record.numbers["batch_size"]]
            self._compare.integers(place, _FED, *sizes, f"size of batch {self._fed}, entry", 0)
        self._fed += 1
        if self._policy is not None:
            self._policy.of(self._graph_size(record.numbers["batch_size"])).tell(told)

    def _graph_size(self, batch: int) -> int:
        """The size by which the engine chooses: that of the graph which a batch of this size runs in; without a graph its
        own."""
        return next((size for size in self._graphs if size >= batch), batch)

    @stages("flushed")
    def check_flushed(self, _number: int, record: Record) -> None:
        if self._policy is not None and self._fed < len(self._ran) and self._compare.on(_FED):
            name, expected = "accepted drafts that the choice was told", f"those of {len(self._ran)} batches"
            self._compare.report(Place(record, "finished"), _FED, name, expected, f"those of {self._fed}")


def _policy(case: Case) -> Policy | None:
    adaptive = case.engine.sglang.adaptive
    if adaptive is None:
        return None
    knobs = Knobs(**{one.name: getattr(adaptive, one.name) for one in fields(Knobs)})
    return Policy(case.num_steps, {tier.batch: tier.steps for tier in adaptive.tiers}, knobs)
