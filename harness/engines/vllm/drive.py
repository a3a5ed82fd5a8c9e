"""Step vLLM's EngineCore through a case: add requests and abort them, `EngineCore.step()`, and what it outputs.

The budget of a step's prefills is the case's: the scheduler's limit of tokens is set to it before each step, beside what the
requests need that run.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import COUNTS, UNSAID, Finish, Jittered
from eagletwin.harness.core.trace import Recorder, When
from eagletwin.harness.engines.inside import blame
from eagletwin.harness.engines.inside.adapter import EndlessCase, Live, Reached, Stopped
from eagletwin.harness.families import RECIPES

from .pools import DRAFT, TARGET, Blocks
from .taps import StepTaps

_FINISHES = {"STOP": Finish.STOP, "LENGTH": Finish.LENGTH, "ABORT": Finish.ABORT}


@dataclass(slots=True)
class _Answer:
    """What was output for a request: its tokens, how many each output had, and what the last one says of its end."""

    tokens: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, UNSAID))
    numbers: dict[str, int] = field(default_factory=dict)
    histogram: list[int] | None = None

    def take(self, output: Any) -> None:
        """An EngineCoreOutput."""
        self.tokens += output.new_token_ids
        self.sent.append(len(output.new_token_ids))
        if output.prefill_stats is not None and self.counts["cached_tokens"] == UNSAID:
            self.counts["cached_tokens"] = output.prefill_stats.num_cached_tokens
        if output.finish_reason is not None:
            matched = output.stop_reason if isinstance(output.stop_reason, int) else UNSAID
            kind = _FINISHES.get(output.finish_reason.name, Finish.OTHER)
            ends = {"finish": kind, "finish_matched": matched, "finish_length": len(self.tokens)}
            accepted = output.spec_decode_metrics.per_step_accepted
            self.numbers = self.counts | {"verify_ct": len(accepted), "correct_drafts": sum(accepted)} | ends
            self.histogram = [accepted.count(number) for number in range(max(accepted, default=-1) + 1)]

    @property
    def tensors(self) -> dict[str, Array]:
        """As they are recorded. The front end decodes what it is sent, and counts by itself."""
        tokens = np.array(self.tokens, np.int64)
        sent = np.array([(count, -1, count) for count in self.sent], np.int64).reshape(-1, 3)
        histogram = {} if self.histogram is None else {"histogram": np.array(self.histogram, np.int64)}
        return {"tokens": tokens, "decoded": tokens, "sent": sent} | histogram


class CoreDrive:
    """One case on one engine core.

    until  raise Stopped after this iteration; -1: never
    live   asked before each iteration for the case as it is now, and whether there will be more; None: `case` is all
    """

    jittered: Jittered | None = None

    def __init__(
        self, core: Any, case: Case, recorder: Recorder, reached: Reached, until: int = -1, live: Live | None = None
    ) -> None:
        self.case = case
        self._core, self._scheduler = core, core.scheduler
        self._recorder, self._reached, self._until, self._live = recorder, reached, until, live
        self._blocks = Blocks(core)
        self._taps = StepTaps(core, case, recorder, reached, self._blocks)
        self._answers: dict[str, _Answer] = {}
        self._finished: set[str] = set()
        self._aborted: set[str] = set()
        self._iteration = 0

    def run(self, fresh: bool = False) -> None:  # noqa: ARG002  each runner is a fork, which has drained what ran before
        """Run the case to its end. Raises what vLLM raises, EndlessCase or Stopped."""
        self._taps.pools.poison()
        np.random.seed(0)  # of it vLLM draws the seeds of requests that have none, and other cases ran here before
        usual = self._scheduler.max_num_scheduled_tokens
        with blame.own_code(), contextlib.closing(self._taps):
            try:
                while self._step():
                    pass
            finally:
                self._scheduler.max_num_scheduled_tokens = usual
        self._record_cached()
        self._core.reset_prefix_cache()
        self._account("flushed")

    def _record_cached(self) -> None:
        """The rows that the prefix cache keeps of finished requests: as long a prefix of each as a new request would get."""
        if not self.case.vllm.enable_prefix_caching:
            return
        for name in self._taps.recorded:  # of a request that is aborted before its first step is over there is nothing
            asked = self.case.request(name)
            tokens = [*asked.prompt, *self._answers[name].tokens]
            slots = self._blocks.prefix(self._engine_request(asked, tokens))
            rows = {f"{part}_kv": self._taps.pools.rows(part, slots) for part in (TARGET, DRAFT)}
            tensors = {"tokens": np.array(tokens, np.int64), "slots": slots} | rows
            self._recorder.add(name, 0, "cached", when=When(self._iteration), tensors=tensors)

    def _step(self) -> bool:
        """One iteration; False: there is nothing left to do."""
        self._taps.iteration = self._iteration
        self._reached("schedule")
        self._account("iteration")
        self._record_finished()
        if self._live is not None:
            self.case, more = self._live(self._iteration, self.case)
            self._live = self._live if more else None
        coming = [request for request in self.case.requests if request.id not in self._answers]
        if self._live is None and not coming and not self._scheduler.has_requests() and not self._core.batch_queue:
            return False
        self._taps.pools.poison(self._blocks.unheld())
        for request in coming:
            if request.arrive <= self._iteration and (not request.after or request.after in self._finished):
                self._add(request)
        for event in self.case.events:
            if event.at == self._iteration:
                self._abort(event.request)
        self._set_budget()
        with blame.own_code(inside=False):
            outputs, ran = self._core.step_fn()
            self._core.post_step(ran)
        for output in (one for each in (outputs or {}).values() for one in each.outputs):
            self._answers[output.request_id].take(output)
        if 0 <= self._until <= self._iteration:
            raise Stopped(f"after iteration {self._iteration}, as asked")
        self._iteration += 1
        if self._iteration > self._limit():
            unfinished = ", ".join(sorted(self._answers.keys() - self._finished))
            raise EndlessCase(f"{self._iteration} iterations, and these are not finished: {unfinished}")
        return True

    def _account(self, stage: str) -> None:
        numbers, tensors = self._blocks.account()
        self._recorder.add("", 0, stage, step=self._iteration, when=When(self._iteration), numbers=numbers, tensors=tensors)

    def _add(self, asked: Request) -> None:
        self._answers[asked.id] = _Answer()
        self._core.add_request(self._engine_request(asked, asked.prompt))

    def _engine_request(self, asked: Request, tokens: Sequence[int]) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as EngineRequest

        ends = [*asked.stop, RECIPES[self.case.model].end_of_sequence] if asked.stop else []
        wanted: dict[str, Any] = {"temperature": 0.0}
        if (own := asked.sampling) is not None:
            wanted = {name: getattr(own, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
        if asked.penalties is not None:
            of = ("frequency", "presence", "repetition")
            wanted |= {f"{name}_penalty": getattr(asked.penalties, name) for name in of}
        wanted["logit_bias"] = {bias.token: bias.value for bias in asked.logit_bias} or None
        params = SamplingParams(max_tokens=asked.max_new_tokens, ignore_eos=True, stop_token_ids=ends, **wanted)
        return EngineRequest(
            request_id=asked.id,
            prompt_token_ids=list(tokens),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._core.request_block_hasher,
        )

    def _abort(self, name: str) -> None:
        if name in self._answers and name in self._scheduler.requests:
            self._aborted.add(name)
            self._core.abort_requests([name])

    def _record_finished(self) -> None:
        """The ends of requests since the last iteration. Of one that is aborted vLLM outputs nothing: its client hung up."""
        for name, answer in self._answers.items():
            if name in self._finished or name in self._scheduler.requests:
                continue
            self._finished.add(name)
            aborted = int(name in self._aborted)
            numbers = {"aborted": aborted, "dropped": aborted} | answer.numbers
            self._recorder.add(name, 0, "finished", when=When(self._iteration), numbers=numbers, tensors=answer.tensors)

    def _set_budget(self) -> None:
        """Tokens of the next step: of prefills as many as the case says, and of the requests that run what they ask for."""
        chunks = self.case.chunks
        chunk = chunks[self._taps.prefills] if self._taps.prefills < len(chunks) else self.case.chunked_prefill_size
        if self.case.vllm.whole_budget:
            self._scheduler.max_num_scheduled_tokens = chunk
            return
        running = sum(
            request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            for request in self._scheduler.running
            if request.num_computed_tokens >= request.num_tokens - 1
        )
        self._scheduler.max_num_scheduled_tokens = chunk + running

    def _limit(self) -> int:
        """Iterations that the case can need: a token of a prompt or of an answer in each; twice that, and room to start."""
        work = sum(len(request.prompt) + request.max_new_tokens for request in self.case.requests)
        return 2 * work + self.case.last_arrival + 20
