"""The client's side of a case: its events as messages, its adapters, and its streaming sessions."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from eagletwin.harness.core.case import Adapter, Case, Event, Request, before, whole_prompts
from eagletwin.harness.core.trace import Recorder, When
from eagletwin.harness.engines.inside.blame import Around, NotDriven, Wraps
from eagletwin.harness.families.adapters import MOST_RANK, PROJECTIONS, modules
from eagletwin.harness.families.store import adapter_folder

from .answers import Fates

# A case's events as the messages that SGLang takes from its tokenizer process.


def messages(event: Event, paused: bool) -> list[Any]:
    """paused: whether the scheduler is, before the event."""
    from sglang.srt.managers import io_struct

    if event.kind == "abort":
        # SGLang ignores an abort of a request it does not know, so one that has not arrived yet is not aborted
        return [io_struct.AbortReq(rid=event.request)]
    if event.kind == "flush":
        return [io_struct.FlushCacheReqInput()]
    if event.kind == "retract":
        pause = io_struct.PauseGenerationReqInput(mode="retract")
        return [pause] if paused else [pause, io_struct.ContinueGenerationReqInput()]
    if event.kind == "pause":
        return [io_struct.PauseGenerationReqInput(mode="in_place")]
    return [io_struct.ContinueGenerationReqInput()]


def pauses(event: Event, paused: bool) -> bool:
    """Whether the scheduler is paused after the event."""
    return event.kind == "pause" if event.kind in ("pause", "resume") else paused


# Adapters (LoRA) of a case's requests, as SGLang is given them: its server arguments, and the message by which a server loads
# one from a folder. Imported in a process that has SGLang.


def arguments(case: Case) -> dict[str, Any]:
    """Fields of ServerArgs. Which adapters there will be is not known when an engine is started."""
    if not case.adapters:
        return {}
    settings = case.engine.sglang
    return {
        "enable_lora": True,
        "max_lora_rank": MOST_RANK,
        "lora_target_modules": modules(Adapter()),
        "max_loras_per_batch": settings.max_loras_per_batch,
        "lora_backend": settings.lora_backend,
    }


def refuse() -> None:
    """Raises NotDriven where this release loads none."""
    from sglang.srt.managers import io_struct

    if not hasattr(io_struct, "LoadLoRAAdapterReqInput"):
        raise NotDriven("adapters: this release loads none while it runs")


def name_of(adapter: Adapter) -> str:
    """An id as SGLang's own: 32 hexadecimal digits, other ones for another adapter."""
    on = tuple(PROJECTIONS).index(adapter.on)
    return f"{adapter.seed:016x}{adapter.rank:08x}{on:08x}"


def load(scheduler: Any, case: Case) -> None:
    """Give the scheduler those adapters of a case that it does not have. Raises RuntimeError with its word if it refuses.

    On a CPU SGLang makes an MLP's width a multiple of 32, and does not so with an adapter's: it gets one that is as wide."""
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

    runner = scheduler.tp_worker.model_runner
    inner, manager = runner.model_config.hf_config.intermediate_size, runner.lora_manager
    for adapter in case.adapters:
        name = name_of(adapter)
        if name in manager.loras:
            continue
        folder = str(adapter_folder(case.model, adapter, inner))
        answer = scheduler._request_dispatcher(LoadLoRAAdapterReqInput(lora_name=name, lora_path=folder, lora_id=name))
        if not answer.success:
            raise RuntimeError(f"an adapter was not loaded: {answer.error_message}")


# Streaming sessions of a case, from the client's side: a request is handed in when the one before it has been answered, a
# session is opened with its first request, and closed when the case says so, at the latest when all requests have ended.
#
# Called by drive.py. Each request of a session is recorded when it is handed in, and each close: stage `session`.

_LENGTH = 1 << 20  # of a session's text; SGLang asks for it and does not look at it


class OpenSessions:
    """Which sessions of a case are open, by what the client knows."""

    def __init__(self, case: Case, recorder: Recorder) -> None:
        self._case, self._recorder = case, recorder
        self._names = case.sessions
        self._closes = 0
        self._open: list[str] = []
        self._opening: set[str] = set()  # requests that came with a session that was not open

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    def may_come(self, request: Request, fates: Fates) -> bool:
        """Whether a request may be handed in now, as far as its session goes."""
        earlier = before(self._case, request.id)
        return not earlier or earlier in fates.finished

    def enter(self, request: Request, iteration: int) -> Iterator[Any]:
        """What comes before a request that is handed in: the message that opens its session, if it is not open."""
        if not request.session:
            return
        opens = request.session not in self._open
        self._recorder.add(request.id, 0, "session", when=When(iteration), numbers={"opens": int(opens)})
        if opens:
            self._opening.add(request.id)
            from sglang.srt.managers import io_struct

            self._open.append(request.session)
            yield io_struct.OpenSessionReqInput(capacity_of_str_len=_LENGTH, session_id=request.session, streaming=True)

    def prompts(self, fates: Fates) -> dict[str, tuple[int, ...]]:
        """By request of a session: all that it was asked."""
        ended = (name for name in fates.finished if name not in fates.aborted and name in fates.answers)
        return whole_prompts(self._case, {name: fates.answers[name].tokens for name in ended}, self._opening)

    def close(self, name: str, iteration: int) -> Iterator[Any]:
        """A session that is not open is not closed: its client knows."""
        if name not in self._open:
            return
        from sglang.srt.managers import io_struct

        self._open.remove(name)
        numbers = {"closes": self._names.index(name)}
        self._recorder.add("", 0, "session", step=self._closes, when=When(iteration), numbers=numbers)
        self._closes += 1
        yield io_struct.CloseSessionReqInput(session_id=name)

    def close_all(self, iteration: int) -> Iterator[Any]:
        for name in tuple(self._open):
            yield from self.close(name, iteration)


# Aborts that come inside a step: while a batch runs, after the worker was given it and before its result is looked at.
#
# SGLang's scheduler is one thread, and looks for messages at the start of an iteration alone. One that comes while a batch runs
# lies in its socket until then: with overlap the result of the batch has not been looked at when it is read, without overlap it
# has. So the message is handed to the scheduler at its first look after the launch, before all that comes later.


class InStep:
    """Counts the batches of a scheduler, and says which of a case's events are due. drive.py asks before each iteration.

    Results are looked at in the order in which their batches were launched, so two numbers say which are under way.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._wraps = Wraps()
        self._launched, self._read = 0, 0
        self._batches: Counter[str] = Counter()  # by request
        self._sent: set[int] = set()  # events by their number

    def watch(self, scheduler: Any) -> None:
        self._wraps.method(scheduler, "run_batch", self._around_launch)
        self._wraps.method(scheduler, "process_batch_result", self._around_result)

    def undo(self) -> None:
        self._wraps.undo()

    def due(self, case: Case, iteration: int) -> Iterator[Event]:
        """Events that came since the last call, each recorded with the batches that were launched and read when the scheduler
        learns of it."""
        for number, event in enumerate(case.events):
            if not event.step or number in self._sent or self._batches[event.request] < event.step:
                continue
            self._sent.add(number)
            numbers = {"launched": self._launched, "read": self._read}
            self._recorder.add(event.request, 0, "abort", step=number, when=When(iteration), numbers=numbers)
            yield event

    def _around_launch(self, call: Around, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(batch, *args, **kwargs)
        if batch.reqs:
            self._launched += 1
            self._batches.update(request.rid for request in batch.reqs)
        return result

    def _around_result(self, call: Around, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(batch, *args, **kwargs)
        self._read += bool(batch.reqs)
        return result
