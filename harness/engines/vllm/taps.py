"""Records what a step of vLLM computed: forward by forward, as its runners hand rows to the models.

One step prefills chunks and verifies rounds in one forward of the target. Then the draft runs over the same rows, rejected ones
included, and num_steps - 1 times over one row a request. Both runners do so, and call the models in the same way: the taps
stand around the models and around what proposes, and know of the runners no more than where these are.

What is drafted in a step is verified in a later one, or never: its records wait for that. With async scheduling a step runs
before it is known which requests the one before has ended. So the records of a step wait until the scheduler is given its
output, and those of a request that has ended by then are left out.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from eagletwin.harness.core.arrays import Array, changed_rows
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.trace import Recorder, When, snapshot
from eagletwin.harness.engines.inside.adapter import Reached
from eagletwin.harness.engines.inside.blame import Wraps

from . import boot
from .pools import DRAFT, TARGET, Blocks, Pools

Call = Callable[..., Any]


@dataclass(slots=True)
class _Forward:
    """One forward of a model: [n] tokens, positions and slots, and [n, H] what goes in and comes out."""

    ids: Array
    positions: Array
    slots: Array
    given: Array | None
    out: Array


@dataclass(slots=True)
class _Drafted:
    """What a step drafted for a request: forward: the ordinal of the first of draft decode."""

    forward: int
    decodes: list[dict[str, Array]]
    slots: Array
    rows: Array


@dataclass(slots=True)
class _Sampled:
    """What tokens were chosen from, a row for each node. logits, processed [n, V]: with penalties and biases, before and after
    temperature and cuts; drafts [requests, num_steps, V]: of the draft, where it draws; places [n] and seeds [requests]: what
    all choices are hashed from; ends [requests + 1]: each request's rows."""

    logits: torch.Tensor
    processed: torch.Tensor
    drafts: torch.Tensor | None
    places: Array
    seeds: list[int]
    ends: list[int]

    def of(self, number: int, accepted: int, temperature: float) -> tuple[dict[str, int], dict[str, Array]]:
        """Of the request of this number, which accepted so many nodes."""
        rows = slice(self.ends[number], self.ends[number + 1])
        kept = slice(rows.start, rows.start + accepted)
        tensors = {
            "target_logits": self.logits[kept],
            "target_probabilities": self.processed[kept].double().softmax(-1).float(),
        }
        if self.drafts is not None:
            drawn = self.drafts[number, : rows.stop - rows.start - 1].double() / temperature
            tensors["draft_probabilities"] = drawn.softmax(-1).float()
        arrays = {name: snapshot(tensor) for name, tensor in tensors.items()}
        return {"seed": self.seeds[number]}, arrays | {"places": self.places[rows]}


@dataclass(slots=True)
class _Scheduled:
    """What the scheduler gives a request in a step. start, known: tokens computed before, and known; drafts: to verify."""

    start: int
    known: int
    tokens: int
    drafts: int


@dataclass(slots=True)
class _Step:
    """What a step has computed so far. drafts: [requests, num_steps], or no columns where it drafts for nobody. records: which
    wait, each with its request."""

    scheduled: dict[str, _Scheduled]
    target: _Forward | None = None
    passes: list[_Forward] = field(default_factory=list)
    fused: Array | None = None  # what the head of EAGLE-3 makes its states of
    last: Array | None = None  # row of the batch that each request proposes from
    drafts: Array | None = None
    sampled: _Sampled | None = None
    records: list[tuple[str, Call]] = field(default_factory=list)


class StepTaps:
    """Stands around one engine core. Use contextlib.closing."""

    def __init__(self, core: Any, case: Case, recorder: Recorder, reached: Reached, blocks: Blocks) -> None:
        runner, drafter = boot.runner_of(core), boot.drafter_of(core)
        self._v2 = case.vllm.model_runner == "v2"
        self.pools = Pools(core, drafter.draft_attn_layer_names if self._v2 else drafter._draft_attn_layer_names)
        self.iteration, self.prefills = 0, 0
        self._case, self._recorder, self._reached, self._blocks = case, recorder, reached, blocks
        self._scheduler, self._drafter = core.scheduler, drafter
        self.seen: dict[str, None] = {}  # requests that had blocks, in their order
        self.recorded: dict[str, None] = {}  # requests of which a chunk was recorded, in their order
        self._rounds: dict[str, int] = {}  # verified rounds of each request that decodes
        self._prefilling: set[str] = set()  # of those that were prefilled before, as after a preemption
        self._drafted: dict[str, _Drafted] = {}
        self._last: dict[tuple[str, str], Array] = {}  # rows of a request as they were recorded, by request and part
        self._forwards = self._batches = 0
        self._step, self._steps = _Step({}), deque[_Step]()  # the one that runs; those whose output nobody has seen
        self._changed: Any = None  # logits of the step, with penalties and biases
        self._wraps = Wraps()
        self._taken = set[int]()  # blocks that a step gives to requests, whatever was in them
        self._wraps.method(core.scheduler, "schedule", self._around_schedule)
        self._wraps.method(core.scheduler.kv_cache_manager.block_pool, "get_new_blocks", self._around_new_blocks)
        self._wraps.method(core.scheduler, "update_from_output", self._around_update)
        self._wraps.method(runner, "sample_tokens", self._around_sample_tokens)
        self._wraps.method(runner.model, "forward", self._around_target)
        self._wraps.method(drafter.model, "forward", self._around_draft)
        self._wraps.method(drafter, "propose", self._around_propose)
        if self._v2 and case.samples:
            self._wraps.method(runner.sampler, "sample", self._around_sample)
            self._wraps.method(runner.rejection_sampler, "_verify", self._around_verify)
            self._wraps.method(runner.sampler.sampling_states, "apply_temperature", self._around_temperature)
        self._states: Any = runner.sampler.sampling_states if self._v2 else None
        if hasattr(drafter.model, "combine_hidden_states"):
            self._wraps.method(drafter.model, "combine_hidden_states", self._around_fc)

    def close(self) -> None:
        self._wraps.undo()

    # what a step computes

    def _around_schedule(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        cached, self._taken = self._blocks.cached(), set()
        known = {name: (one.num_computed_tokens, one.num_tokens) for name, one in self._scheduler.requests.items()}
        result = call(*args, **kwargs)
        for name in result.preempted_req_ids or ():
            self._forget(name)
        starts = {new.req_id: new.num_computed_tokens for new in result.scheduled_new_reqs}
        again = result.scheduled_cached_reqs
        starts |= dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        self._step = _Step(
            {
                name: _Scheduled(starts[name], known[name][1], count, len(result.scheduled_spec_decode_tokens.get(name, ())))
                for name, count in result.num_scheduled_tokens.items()
            }
        )
        self._steps.append(self._step)
        if result.total_num_scheduled_tokens:
            self._record_owners(cached)
        return result

    def _around_new_blocks(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        blocks = call(*args, **kwargs)
        self._taken |= {block.block_id for block in blocks}
        return blocks

    def _forget(self, name: str) -> None:
        """A request lost its rows: it is prefilled again."""
        self._prefilling.add(name)
        self._drafted.pop(name, None)
        for part in (TARGET, DRAFT):
            self._last.pop((name, part), None)

    def _around_target(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        self._reached("target forward")
        result = call(*args, **kwargs)
        out = torch.cat(result[1], -1) if isinstance(result, tuple) else result
        ids, positions = snapshot(kwargs["input_ids"]), snapshot(kwargs["positions"])
        self._step.target = _Forward(ids, positions, self._slots(draft=False), None, snapshot(out))
        return result

    def _around_draft(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        self._reached("draft forward")
        given = [snapshot(kwargs[name]) for name in ("input_ids", "positions", "hidden_states")]
        result = call(*args, **kwargs)
        out = result[1] if isinstance(result, tuple) else result
        self._step.passes.append(_Forward(given[0], given[1], self._slots(draft=True), given[2], snapshot(out)))
        return result

    def _slots(self, *, draft: bool) -> Array:
        """Where this forward writes rows."""
        from vllm.forward_context import get_forward_context

        by_layer = get_forward_context().slot_mapping
        layer = next(name for name in sorted(by_layer) if (name in self.pools.draft_layers) == draft)
        return snapshot(by_layer[layer]).astype(np.int64)

    def _around_fc(self, call: Call, states: Any) -> Any:
        self._step.fused = snapshot(states)
        return call(states)

    def _around_propose(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        last = kwargs.get("token_indices_to_sample")
        if not self._v2 and last is None:  # nothing was verified; the call changes what it is given
            last = kwargs["common_attn_metadata"].query_start_loc[1:] - 1
        last = None if last is None else snapshot(last)
        result = call(*args, **kwargs)
        self._step.last = snapshot(self._drafter.last_token_indices[: len(result)]) if last is None else last
        self._step.drafts = snapshot(result)
        return result

    def _around_sample(self, call: Call, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """No request of the batch verifies drafts: one row each."""
        self._changed, mapping, places = logits.clone(), args[1], args[3]
        tokens, processed = call(logits, *args, **kwargs)
        self._note_sampled(processed, None, places, mapping, range(len(mapping) + 1))
        return tokens, processed

    def _around_verify(
        self, call: Call, logits: Any, drafts: Any, tokens: Any, places: Any, ends: Any, mapping: Any, *more: Any
    ) -> Any:
        self._changed = logits.clone()
        result = call(logits, drafts, tokens, places, ends, mapping, *more)
        self._note_sampled(result[0], drafts, places, mapping, ends.tolist())
        return result

    def _around_temperature(self, call: Call, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """Left out where no request of the batch asks for anything."""
        self._changed = logits.clone()
        return call(logits, *args, **kwargs)

    def _note_sampled(self, processed: Any, drafts: Any, places: Any, mapping: Any, ends: Sequence[int]) -> None:
        own = None if drafts is None else drafts[mapping.long()].clone()
        seeds = self._states.seeds.gpu[mapping.long()].tolist()
        self._step.sampled = _Sampled(self._changed, processed.clone(), own, snapshot(places), seeds, [*ends])

    def _around_sample_tokens(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """All is computed, and nobody has seen it yet."""
        output = call(*args, **kwargs)
        output = output.get_output() if hasattr(output, "get_output") else output
        self._record(list(output.req_ids), output.sampled_token_ids)
        return output

    def _around_update(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        for name, record in self._steps.popleft().records:
            if not name or name in self._scheduler.requests:
                self.recorded |= {name: None} if name else {}
                record()
        return call(*args, **kwargs)

    # what is recorded of it

    def _add(
        self,
        request: str,
        stage: str,
        step: int,
        numbers: dict[str, int],
        tensors: dict[str, Array],
        forward: int | None = None,
    ) -> None:
        when = When(self.iteration, self._forwards if forward is None else forward)
        self._hold(request, self._rounds.get(request, 0), stage, step=step, when=when, numbers=numbers, tensors=tensors)

    def _hold(self, request: str, *what: Any, **more: Any) -> None:
        self._step.records.append((request, partial(self._recorder.add, request, *what, **more)))

    def _record_owners(self, cached: set[int]) -> None:
        """Who owns which slot when a batch begins. cached: the prefix cache's blocks before it was scheduled, which publishes
        blocks that the batch is to write."""
        self.seen.update(dict.fromkeys(self._blocks.live))
        owned = {name: self._blocks.table(name) for name in self.seen}
        owners = np.repeat(np.arange(len(owned), dtype=np.int32), [len(slots) for slots in owned.values()])
        still = sorted(cached & self._blocks.cached() - self._taken)
        self._hold(
            "",
            0,
            "batch",
            step=self._batches,
            when=When(self.iteration, self._forwards),
            numbers={f"request.{name}": number for number, name in enumerate(owned)},
            tensors={
                "slots": np.concatenate([np.empty(0, np.int64), *owned.values()]),
                "owners": owners,
                "cached": self._blocks.slots(still),
            },
        )
        self._batches += 1

    def _record(self, names: list[str], sampled: list[list[int]]) -> None:
        """The records of all requests of a step, in the order of the batch's rows."""
        step, begin = self._step, 0
        base = self._forwards + 1  # the target's forward; the draft's follow
        self._forwards = base + len(step.passes)
        prefilled = False
        for number, (name, tokens) in enumerate(zip(names, sampled, strict=True)):
            given = step.scheduled[name]
            batch = _Batch(step, number, begin, base)
            begin += given.tokens
            if name in self._rounds and name not in self._prefilling:
                self._record_round(name, given, tokens, batch)
            else:
                self._record_chunk(name, given, tokens, batch)
                prefilled = True
        self.prefills += prefilled

    def _record_chunk(self, name: str, given: _Scheduled, tokens: list[int], batch: "_Batch") -> None:
        """A part of a prompt, or after a preemption of all that is known. A last part of one token may be padded to a round's
        rows, of which the others are nobody's."""
        end = min(given.start + given.tokens, given.known)
        final = end == given.known
        rows = slice(batch.begin, batch.begin + end - given.start)
        self._add(name, "target.extend", given.start, {}, batch.of_target(rows), batch.forward)
        self._add(name, "draft.extend", given.start, {}, batch.of_extend(rows, rows), batch.forward + 1)
        numbers = {"start": given.start, "end": end, "final": int(final)} | ({} if final else {"tokens": given.known})
        numbers |= {"padded": 1} if given.start + given.tokens > end else {}
        tensors = self._changed_rows(name, end)
        if final:
            tensors |= {"next_token": np.array(tokens[:1], np.int64)} | batch.proposal
            numbers |= batch.skipped
        self._add(name, "prefill", given.start, numbers, tensors)
        if final:
            self._prefilling.discard(name)
            self._rounds.setdefault(name, 0)
            self._keep_drafts(name, batch)

    def _record_round(self, name: str, given: _Scheduled, tokens: list[int], batch: "_Batch") -> None:
        """The verification of what was drafted for it, and the draft's forward over its rows."""
        assert batch.step.target is not None
        committed, accepted = int(batch.step.target.positions[batch.begin]), len(tokens)
        rows = slice(batch.begin, batch.begin + given.tokens)
        kept = slice(batch.begin, batch.begin + accepted)
        steps = {"steps": given.drafts} if given.drafts < self._case.num_steps else {}
        self._record_drafts(name, committed, batch.nodes(rows), steps)
        self._add(name, "target.verify", 0, {}, batch.of_target(rows), batch.forward)
        numbers = {"seq_len": committed, "accept_len": accepted, "new_seq_len": committed + accepted} | steps
        if accepted:
            numbers["bonus"] = tokens[-1]
        tensors = {"predicted": np.array(tokens, np.int64), "accept_index": np.arange(accepted)}
        asked = self._case.request(name).sampling
        if asked is not None and batch.step.sampled is not None:
            more = batch.step.sampled.of(batch.number, accepted, asked.temperature)
            numbers, tensors = numbers | more[0], tensors | more[1]
        self._add(name, "verify", 0, numbers, tensors)
        self._add(name, "draft.extend_decode", 0, {}, batch.of_extend(kept, rows), batch.forward + 1)
        numbers = {"seq_len": committed + accepted, "in_graph": 0} | batch.skipped
        self._add(name, "extend", 0, numbers, self._changed_rows(name, committed + accepted) | batch.proposal)
        self._rounds[name] += 1
        self._keep_drafts(name, batch)

    def _record_drafts(self, name: str, committed: int, nodes: Array, steps: dict[str, int]) -> None:
        """What was drafted for a request, of which `nodes` are verified: as many as the scheduler had room for."""
        drafted, number = self._drafted.pop(name), len(nodes) - 1
        used = max(number - 1, 0)
        for step, tensors in enumerate(drafted.decodes[:used], 1):
            self._add(name, "draft.decode", step, {}, tensors, drafted.forward + step - 1)
        tensors = {
            "tokens": nodes,
            "positions": committed + np.arange(number + 1),
            "table": self._blocks.table(name),
            "scratch_slots": drafted.slots[:used],
            "scratch_kv": drafted.rows[:used],
        }
        self._add(name, "draft", 0, {"seq_len": committed, "in_graph": 0} | steps, tensors)

    def _keep_drafts(self, name: str, batch: "_Batch") -> None:
        decodes = batch.decodes
        slots = np.array([int(one["slots"][0]) for one in decodes], np.int64)
        self._drafted[name] = _Drafted(batch.forward + 2, decodes, slots, self.pools.rows(DRAFT, slots))

    def _changed_rows(self, name: str, end: int) -> dict[str, Array]:
        """A request's slots, and of its first `end` rows those that are not as they were recorded last."""
        table = self._blocks.table(name)[:end]
        tensors = {"table": table}
        for part in (TARGET, DRAFT):
            now = self.pools.rows(part, table)
            at = changed_rows(now, self._last.get((name, part)))
            self._last[name, part] = now
            tensors |= {f"{part}_rows": at, f"{part}_kv": now[at]}
        return tensors


@dataclass(slots=True)
class _Batch:
    """What a step computed for the request of this number. begin: the first of its rows; forward: the target's ordinal."""

    step: _Step
    number: int
    begin: int
    forward: int

    @property
    def first(self) -> _Forward:
        """The draft's forward over the rows of all requests; one of no rows, where the runner leaves it out."""
        if self.step.passes:
            return self.step.passes[0]
        target = self.step.target
        assert target is not None
        return _Forward(target.ids[:0], target.positions[:0], target.slots[:0], target.out[:0], target.out[:0])

    def nodes(self, rows: slice) -> Array:
        assert self.step.target is not None
        return self.step.target.ids[rows].astype(np.int64)

    def of_target(self, rows: slice) -> dict[str, Array]:
        target = self.step.target
        assert target is not None
        ids = target.ids[rows].astype(np.int64)
        return {
            "input_ids": ids,
            "positions": target.positions[rows],
            "slots": target.slots[rows],
            "hidden_out": target.out[rows],
        }

    def of_extend(self, rows: slice, written: slice) -> dict[str, Array]:
        """The draft's forward over these rows. written: with those of rejected drafts, which it writes too."""
        first, fused = self.first, self.step.fused
        given = first.given if fused is None else fused
        assert given is not None
        ids = first.ids[rows].astype(np.int64)
        return {"input_ids": ids, "positions": first.positions[rows], "slots": first.slots[written], "hidden_in": given[rows]}

    @property
    def skipped(self) -> dict[str, int]:
        """Whether nothing was proposed, since no request of the batch could use it."""
        drafts = self.step.drafts
        return {} if drafts is not None and drafts.shape[1] and drafts[self.number, 0] >= 0 else {"skipped": 1}

    @property
    def proposal(self) -> dict[str, Array]:
        drafts, last = self.step.drafts, self.step.last
        if self.skipped or drafts is None or last is None:
            return {}
        return {"proposal": drafts[self.number, :1].astype(np.int64), "proposal_hidden": self.first.out[last[self.number]]}

    @property
    def decodes(self) -> list[dict[str, Array]]:
        """Draft decode, a row a step."""
        at, found = slice(self.number, self.number + 1), []
        for one in self.step.passes[1:]:
            assert one.given is not None
            tensors = {"input_ids": one.ids[at].astype(np.int64), "positions": one.positions[at], "slots": one.slots[at]}
            found.append(tensors | {"hidden_in": one.given[at], "hidden_out": one.out[at]})
        return found
