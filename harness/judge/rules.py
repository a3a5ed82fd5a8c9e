"""The rules: each record of a trace against what the reference says it must be.

One method a stage, called in the order in which data flows. A finding remembers where in that order it stands, so that the
first of them is the cause and the rest its consequences, whatever order the engine happened to record them in.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagletwin.harness.trace import Record, Trace
from eagletwin.reference.verify import verify_inputs

from .bounds import error_of, is_tie, undecided
from .story import Round, Story, rows_of, stored_rows
from .verdict import Divergence

# Order of data flow within one scheduler iteration.
_PHASES = ("iteration", "target.extend", "draft.extend", "draft", "target.verify", "verify", "draft.extend_decode", "finished")


@dataclass(slots=True)
class Findings:
    """What the rules found. `found` holds (order, divergence); the order is (iteration, phase, step, rank, request)."""

    found: list[tuple[tuple[int, ...], Divergence]] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    choices: int = 0
    ties: int = 0
    headroom: float = 0.0


class Rules:
    """Checks the records of one trace. `without`: rules that are switched off."""

    def __init__(self, trace: Trace, stories: dict[str, Story], without: frozenset[str]) -> None:
        self.findings = Findings()
        self._trace = trace
        self._stories = stories
        self._without = without
        self._case = trace.header.case
        self._order = {request.id: n for n, request in enumerate(self._case.requests)}
        self._numbers = {record.key: n for n, record in enumerate(trace.header.records)}
        self._tables: dict[str, Tensor] = {}  # committed part of each live request's req_to_token, as last seen
        self._written: dict[int, dict[int, str]] = {}  # forward -> slot -> request

    def check(self) -> Findings:
        checks = {
            "target.extend": self._target_extend,
            "draft.extend": self._draft_extend,
            "prefill": self._prefill,
            "draft.decode": self._draft_decode,
            "draft": self._draft,
            "target.verify": self._target_verify,
            "verify": self._verify,
            "draft.extend_decode": self._draft_extend_decode,
            "extend": self._extend,
            "finished": self._finished,
            "cached": self._cached,
            "iteration": self._accounting,
            "flushed": self._accounting,
        }
        for number, record in enumerate(self._trace.header.records):
            checks[record.stage](number, record)
        return self.findings

    # -- what a finding is made of -------------------------------------------------------------------------------------

    def _report(
        self,
        rule: str,
        record: Record,
        phase: str,
        step: int,
        index: str,
        expected: object,
        actual: object,
        why: str = "",
    ) -> None:
        rank = len(self.findings.found)  # rules of one stage are checked in the order in which data flows
        order = (record.iteration, _PHASES.index(phase), step, self._order.get(record.request, -1), rank)
        divergence = Divergence(
            rule=rule,
            request=record.request,
            round=record.round,
            stage=record.stage,
            step=step if record.stage == "draft" else record.step,
            iteration=record.iteration,
            index=index,
            expected=str(expected),
            actual=str(actual),
            why=why,
        )
        self.findings.found.append((order, divergence))

    def _on(self, rule: str) -> bool:
        if rule in self._without:
            return False
        self.findings.checked[rule] += 1
        return True

    def _integers(
        self,
        rule: str,
        record: Record,
        phase: str,
        expected: list[int],
        actual: list[int],
        rows: str,
        first: int,
        why: str = "",
    ) -> None:
        """Compare exactly; report the first row that differs. Rows are numbered from `first`, as positions."""
        if not self._on(rule):
            return
        step = record.step if record.stage == "draft.decode" else 0  # place in the order of data flow
        if len(expected) != len(actual):
            self._report(rule, record, phase, step, f"number of {rows}s", len(expected), len(actual), why)
            return
        wrong = [n for n, (must, has) in enumerate(zip(expected, actual, strict=True)) if must != has]
        if wrong:
            at = wrong[0]
            index = f"{rows} {first + at}" + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
            self._report(rule, record, phase, step, index, expected[at], actual[at], why)

    def _floats(
        self, rule: str, record: Record, phase: str, step: int, expected: Tensor, actual: Tensor, rows: list[str], why: str = ""
    ) -> None:
        """Compare rows [R, ..] within the bound; report the first row that differs, by its largest error."""
        if not self._on(rule):
            return
        if expected.shape != actual.shape:
            self._report(rule, record, phase, step, "shape", tuple(expected.shape), tuple(actual.shape), why)
            return
        if not len(expected):
            return
        share = error_of(expected, actual)
        wrong = (share > 1).nonzero().flatten().tolist()
        good = share[share <= 1]
        if len(good):
            self.findings.headroom = max(self.findings.headroom, float(good.max()))
        if wrong:
            at = wrong[0]
            must, has = expected[at].flatten(), actual[at].double().flatten()
            worst = int((has - must).abs().nan_to_num(torch.inf).argmax())
            size = f"{float(share[at]):.3g} times the bound"
            index = f"{rows[at]}, element {worst}" + (f", and {len(wrong) - 1} more rows" if len(wrong) > 1 else "")
            self._report(
                rule, record, phase, step, index, f"{float(must[worst]):.6g}", f"{float(has[worst]):.6g} ({size})", why
            )

    def _choice(
        self, rule: str, record: Record, phase: str, step: int, logits: Tensor, actual: int, index: str, why: str = ""
    ) -> None:
        """An argmax over logits [V]. A different choice is a divergence only if the reference itself can tell the two apart."""
        if not self._on(rule):
            return
        self.findings.choices += 1
        expected = int(logits.argmax())
        if not 0 <= actual < len(logits):
            self._report(rule, record, phase, step, index, expected, f"{actual}, outside the vocabulary", why)
            return
        if is_tie(logits):
            self.findings.ties += 1
        if actual != expected and not undecided(logits, expected, actual):
            margin = float(logits[expected] - logits[actual])
            self._report(rule, record, phase, step, index, expected, f"{actual} (its logit is {margin:.3g} lower)", why)

    def _slots(self, record: Record, phase: str, number: int, table: Tensor, first: int) -> None:
        """Every slot that a forward wrote for a request is the request's own, and no other live request's."""
        if not self._on("draft.slots"):
            return
        # in draft() too they come first: all its slots are assigned before its first forward, and a slot written twice
        # shows in the row of an earlier step
        step = 0
        actual = [int(slot) for slot in self._trace.tensor(number, "slots")]
        expected = [int(slot) for slot in table[first : first + len(actual)]]
        for n, (must, has) in enumerate(zip(expected, actual, strict=False)):
            if must != has:
                index = f"position {first + n}"
                self._report("draft.slots", record, phase, step, index, f"slot {must}", f"slot {has}")
                return
        taken = self._written.setdefault(record.forward, {})
        others = {int(slot): name for name, slots in self._tables.items() if name != record.request for slot in slots}
        for n, slot in enumerate(actual):
            owner = taken.get(slot) or others.get(slot)
            if slot != 0 and owner is not None:
                index = f"position {first + n}"
                self._report(
                    "draft.slots",
                    record,
                    phase,
                    step,
                    index,
                    f"a slot of {record.request}'s own",
                    f"slot {slot}, which is {owner}'s",
                )
                return
            taken[slot] = record.request

    def _table(self, record: Record, boundary: str, step: int = 0) -> Tensor | None:
        """req_to_token of the request at the boundary record that goes with an inner one; None if the run ended before it."""
        number = self._numbers.get((record.request, record.round, boundary, step))
        return None if number is None else self._trace.tensor(number, "table")

    def _chunk_end(self, number: int, record: Record) -> int:
        """Where the chunk of a prefill forward ends; by the forward's own slots if the run ended before the chunk did."""
        boundary = self._numbers.get((record.request, record.round, "prefill", record.step))
        if boundary is None:
            return record.step + len(self._trace.tensor(number, "slots"))
        return self._trace.header.records[boundary].numbers["end"]

    def _ints(self, number: int, name: str) -> list[int]:
        return [int(value) for value in self._trace.tensor(number, name).flatten()]

    def _story(self, record: Record) -> Story:
        return self._stories[record.request]

    def _round(self, record: Record) -> Round | None:
        rounds = self._story(record).rounds
        return rounds[record.round] if record.round < len(rounds) else None

    # -- prefill -------------------------------------------------------------------------------------------------------

    def _target_extend(self, number: int, record: Record) -> None:
        story, ids = self._story(record), self._ints(number, "input_ids")
        span = range(record.step, self._chunk_end(number, record))
        self._integers("target.inputs", record, "target.extend", story.tokens[span.start : span.stop], ids, "row", span.start)
        positions = self._ints(number, "positions")
        self._integers("target.inputs", record, "target.extend", list(span), positions, "position of row", span.start)
        table = self._table(record, "prefill", record.step)
        if table is not None:
            self._slots(record, "target.extend", number, table, span.start)

    def _draft_extend(self, number: int, record: Record) -> None:
        story, ids = self._story(record), self._ints(number, "input_ids")
        start, end = record.step, self._chunk_end(number, record)
        why = ""
        if end < len(story.prompt):
            why = f"The chunk ends at {end} and is not the last: its tail row {end - 1} must consume the next prompt token."
        self._integers("draft.input_ids", record, "draft.extend", story.tokens[start + 1 : end + 1], ids, "row", start, why)
        positions = self._ints(number, "positions")
        self._integers("draft.positions", record, "draft.extend", list(range(start, end)), positions, "row", start)
        if story.target is not None:
            rows = [f"row {position}" for position in range(start, end)]
            hidden = self._trace.tensor(number, "hidden_in")
            self._floats("draft.hidden_in", record, "draft.extend", 0, story.target.hidden[start:end], hidden, rows)
        table = self._table(record, "prefill", record.step)
        if table is not None:
            self._slots(record, "draft.extend", number, table, start)

    def _prefill(self, number: int, record: Record) -> None:
        story, end = self._story(record), record.numbers["end"]
        if story.target is None or story.draft is None:
            return
        if record.numbers["final"]:
            token = int(self._trace.tensor(number, "next_token")[0])
            self._choice(
                "output.tokens",
                record,
                "target.extend",
                0,
                story.target.logits[end - 1],
                token,
                f"output token {end - len(story.prompt)}",
            )
        self._stored(number, record, "target.extend", "draft.extend")
        if record.numbers["final"]:
            self._next_proposal(number, record, "draft.extend", end)
        self._tables[record.request] = self._trace.tensor(number, "table")

    def _stored(self, number: int, record: Record, target_phase: str, draft_phase: str) -> None:
        story = self._story(record)
        for part, phase, rows in (("target", target_phase, story.target), ("draft", draft_phase, story.draft)):
            assert rows is not None
            at = self._trace.tensor(number, f"{part}_rows")
            stored = stored_rows(self._trace.tensor(number, f"{part}_keys"), self._trace.tensor(number, f"{part}_values"))
            known = at < rows.keys.shape[1]  # a row past everything that was committed has no reference
            if not bool(known.all()) and self._on(f"{part}.kv"):
                self._report(
                    f"{part}.kv",
                    record,
                    phase,
                    0,
                    f"row {int(at[~known][0])}",
                    "no row: the token was never committed",
                    "a row",
                )
            names = [f"row {int(position)}" for position in at[known]]
            self._floats(f"{part}.kv", record, phase, 0, rows_of(rows, at[known]), stored[known], names)

    def _next_proposal(self, number: int, record: Record, phase: str, committed: int) -> None:
        """d[1] and the hidden state that goes with it, from the last committed row M-1."""
        story = self._story(record)
        assert story.draft is not None
        row = committed - 1
        hidden = self._trace.tensor(number, "proposal_hidden")[None]
        self._floats(
            "draft.hidden_in",
            record,
            phase,
            0,
            story.draft.hidden[row : row + 1],
            hidden,
            [f"state that row {row} hands to draft decode"],
        )
        self._choice("draft.proposal", record, phase, 0, story.draft.logits[row], self._ints(number, "proposal")[0], "d[1]")

    # -- draft and verify ----------------------------------------------------------------------------------------------

    def _draft_decode(self, number: int, record: Record) -> None:
        story, round = self._story(record), self._round(record)
        if round is None:
            return
        step, position = record.step, round.committed + record.step - 1
        must = round.drafted[step - 1 : step]
        self._integers("draft.input_ids", record, "draft", must, self._ints(number, "input_ids"), "row", position)
        self._integers(
            "draft.positions",
            record,
            "draft",
            [position],
            self._ints(number, "positions"),
            "row",
            position,
            f"M = {round.committed} tokens are committed before the bonus token, and this is draft decode step {step}.",
        )
        if step - 1 < len(story.chains[record.round].hidden):
            expected = story.chains[record.round].hidden[step - 1 : step]
            hidden = self._trace.tensor(number, "hidden_in")
            self._floats("draft.hidden_in", record, "draft", step, expected, hidden, [f"row {position}"])
        table = self._table(record, "draft")
        if table is not None:
            self._slots(record, "draft", number, table, position)

    def _draft(self, number: int, record: Record) -> None:
        story, round = self._story(record), self._round(record)
        if round is None:
            return
        committed, chain = round.committed, story.chains[record.round]
        self._integers("verify.inputs", record, "draft", [committed], [record.numbers["seq_len"]], "seq_len, request", 0)
        self._integers("verify.inputs", record, "draft", [round.bonus], self._ints(number, "tokens")[:1], "node", 0)
        positions = list(range(committed, committed + self._case.num_draft_tokens))
        self._integers("verify.inputs", record, "draft", positions, self._ints(number, "positions"), "position of node", 0)
        # d[1] came from the extend before and was judged there: what draft() hands on must be that very token
        before = [
            n
            for n, r in enumerate(self._trace.header.records[:number])
            if r.request == record.request and "proposal" in r.tensors
        ]
        if before:
            proposed = self._ints(before[-1], "proposal")
            self._integers("draft.proposal", record, "draft", proposed, round.drafted[:1], "d[1], node", 1)
        stored = stored_rows(self._trace.tensor(number, "scratch_keys"), self._trace.tensor(number, "scratch_values"))
        expected = stored_rows(chain.keys.transpose(0, 1), chain.values.transpose(0, 1))
        for step in range(1, self._case.num_steps):
            at = slice(step - 1, step)
            row = [f"row {committed + step - 1} of draft decode step {step}"]
            self._floats("draft.scratch_kv", record, "draft", step, expected[at], stored[at], row)
            self._choice("draft.proposal", record, "draft", step, chain.logits[step], round.drafted[step], f"d[{step + 1}]")

    def _target_verify(self, number: int, record: Record) -> None:
        round = self._round(record)
        if round is None:
            return
        nodes = verify_inputs(round.bonus, round.drafted)
        self._integers("verify.inputs", record, "target.verify", nodes, self._ints(number, "input_ids"), "node", 0)
        positions = [round.committed + node for node in range(len(nodes))]
        self._integers(
            "verify.inputs", record, "target.verify", positions, self._ints(number, "positions"), "position of node", 0
        )
        table = self._table(record, "draft")
        if table is not None:
            self._slots(record, "target.verify", number, table, round.committed)

    def _verify(self, number: int, record: Record) -> None:
        story, round = self._story(record), self._round(record)
        if round is None or story.target is None:
            return
        predicted, numbers = self._ints(number, "predicted"), record.numbers
        for node, token in enumerate(predicted):
            logits = story.target.logits[round.committed + node]
            self._choice("verify.accept", record, "verify", node, logits, token, f"token committed after node {node}")
        # the walk, over the target's choices as adopted above
        longest = 0
        while longest < min(len(round.drafted), len(predicted)) and round.drafted[longest] == predicted[longest]:
            longest += 1
        accept_len = longest + 1
        self._integers(
            "verify.accept", record, "verify", [accept_len], [numbers["accept_len"]], "accept length, round", record.round
        )
        self._integers(
            "verify.accept",
            record,
            "verify",
            list(range(len(predicted))),
            self._ints(number, "accept_index"),
            "accepted node",
            0,
        )
        self._integers(
            "verify.accept", record, "verify", predicted[-1:], [numbers["bonus"]], "bonus token, round", record.round
        )
        lengths = [round.committed, round.committed + numbers["accept_len"]]
        self._integers(
            "verify.accept",
            record,
            "verify",
            lengths,
            [numbers["seq_len"], numbers["new_seq_len"]],
            "seq_len before and after, entry",
            0,
        )

    def _draft_extend_decode(self, number: int, record: Record) -> None:
        story, round = self._story(record), self._round(record)
        if round is None or story.target is None:
            return
        start, end = round.committed, round.end
        ids = self._ints(number, "input_ids")
        self._integers("draft.input_ids", record, "draft.extend_decode", story.tokens[start + 1 : end + 1], ids, "row", start)
        positions = self._ints(number, "positions")
        self._integers("draft.positions", record, "draft.extend_decode", list(range(start, end)), positions, "row", start)
        rows = [f"row {position}" for position in range(start, end)]
        hidden = self._trace.tensor(number, "hidden_in")
        self._floats("draft.hidden_in", record, "draft.extend_decode", 0, story.target.hidden[start:end], hidden, rows)
        table = self._table(record, "draft")
        if table is not None:
            self._slots(record, "draft.extend_decode", number, table, start)

    def _extend(self, number: int, record: Record) -> None:
        story, round = self._story(record), self._round(record)
        if round is None or story.target is None or story.draft is None:
            return
        self._stored(number, record, "verify", "draft.extend_decode")
        self._next_proposal(number, record, "draft.extend_decode", round.end)
        self._tables[record.request] = self._trace.tensor(number, "table")

    # -- the end of a request and of the case ----------------------------------------------------------------------------

    def _finished(self, number: int, record: Record) -> None:
        self._tables.pop(record.request, None)
        story, emitted = self._story(record), self._ints(number, "tokens")
        limit = next(request.max_new_tokens for request in self._case.requests if request.id == record.request)
        start = len(story.prompt)
        self._integers("output.tokens", record, "finished", story.tokens[start : start + limit], emitted, "output token", 0)

    def _cached(self, number: int, record: Record) -> None:
        """Rows that the prefix cache keeps must be what a request that reuses them would have computed."""
        story = self._story(record)
        if story.target is None or story.draft is None:
            return
        count = len(self._trace.tensor(number, "slots"))
        tokens = self._ints(number, "tokens")
        self._integers("draft.kv", record, "finished", story.tokens[: len(tokens)], tokens, "token of the cached path", 0)
        for part, rows in (("target", story.target), ("draft", story.draft)):
            stored = stored_rows(self._trace.tensor(number, f"{part}_keys"), self._trace.tensor(number, f"{part}_values"))
            known = min(count, rows.keys.shape[1])
            if known < count and self._on(f"{part}.kv"):
                self._report(
                    f"{part}.kv", record, "finished", 0, f"cached row {known}", "no row: its token was never committed", "a row"
                )
            names = [f"cached row {position}" for position in range(known)]
            self._floats(f"{part}.kv", record, "finished", 0, rows_of(rows, torch.arange(known)), stored[:known], names)

    def _accounting(self, number: int, record: Record) -> None:
        if not self._on("pool.accounting"):
            return
        numbers = record.numbers
        owners: dict[int, str] = {}
        for owner in ("free", "cached", "held"):
            for slot in self._ints(number, owner):
                if slot in owners:
                    self._report(
                        "pool.accounting", record, "iteration", 0, f"slot {slot}", "one owner", f"{owners[slot]} and {owner}"
                    )
                    return
                owners[slot] = owner
        total, flushed = numbers["total"], record.stage == "flushed"
        free = sum(owner == "free" for owner in owners.values())
        if flushed and free != total:
            self._report("pool.accounting", record, "finished", 0, "free slots after the flush", total, free)
        elif len(owners) != total:
            missing = sorted(set(range(min(owners, default=1), min(owners, default=1) + total)) - set(owners))
            index = f"slots with an owner (slot {missing[0]} has none)" if missing else "slots with an owner"
            self._report("pool.accounting", record, "iteration", 0, index, total, len(owners))
        elif numbers["available"] != free or numbers["evictable"] + numbers["protected"] != len(
            self._trace.tensor(number, "cached")
        ):
            counted = f"free {free}, cached {len(self._trace.tensor(number, 'cached'))}"
            said = f"available {numbers['available']}, evictable {numbers['evictable']}, protected {numbers['protected']}"
            self._report("pool.accounting", record, "iteration", 0, "the scheduler's own counts", counted, said)
