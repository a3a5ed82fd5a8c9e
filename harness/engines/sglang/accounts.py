"""Records between batches: slots, ends of requests and the prefix cache; and poison in the slots that are free."""

from collections.abc import Mapping

import numpy as np

from eagletwin.harness.core.arrays import Array, runs_of
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.trace import Recorder, When

from .answers import Fates, Messages
from .taps.taps import Taps


class Accounts:
    """What drive.py notes at the start of an iteration, of the requests that the taps have seen."""

    def __init__(self, case: Case, taps: Taps, recorder: Recorder) -> None:
        self._case = case
        self._taps = taps
        self._recorder = recorder

    def slots(self, stage: str, iteration: int, free: Array) -> None:
        """Whose the slots are. stage: `iteration`, or `flushed` at the end of a case."""
        if not self._taps.records:
            return
        allocation = self._taps.allocation
        held = {name: allocation.held(request) for name, request in self._taps.requests.items()}
        numbers = allocation.counts() | {"live": sum(map(allocation.lives, self._taps.requests.values()))}
        tensors = {
            "free": runs_of(free),
            "cached": allocation.cached(),
            "held": np.array([slot for slots in held.values() for slot in slots], np.int32),
        }
        tensors |= self._of_sessions()
        if allocation.has_windows:
            numbers |= allocation.window_counts()
            tensors["window_free"] = runs_of(allocation.window_free())
            tensors |= {f"window_{kind}": allocation.window_pages(tensors[kind]) for kind in ("cached", "held")}
        if (states := self._taps.states) is not None:
            owned = [slot for request in self._taps.requests.values() for slot in states.held(request)]
            numbers |= {"state_total": states.total, "state_given_up": states.given_up}
            tensors |= {"state_free": runs_of(states.free()), "state_held": np.array(owned, np.int64)}
            tensors |= {"state_cached": (cached := states.cached())} | states.anew(cached)
        if (tier := self._taps.host_tier) is not None:
            more, slots = tier.slots()
            numbers |= more
            tensors |= slots
        self._recorder.add(
            "",
            0,
            stage,
            step=iteration,
            when=When(iteration),
            numbers=numbers,
            tensors=tensors,
        )

    def finished(self, names: list[str], iteration: int, fates: Fates) -> None:
        """The ends of requests since the last iteration, with all that was sent for them."""
        requests = self._taps.requests
        for name in fates.finish(names, lambda name: name in requests and bool(requests[name].finished())):
            answer = fates.answers.get(name, Messages())
            numbers = {"aborted": int(name in fates.aborted), "dropped": int(name in fates.dropped)} | answer.numbers
            self._recorder.add(name, 0, "finished", when=When(iteration), numbers=numbers, tensors=answer.tensors)

    def _of_sessions(self) -> dict[str, Array]:
        """Slots that sessions hold while no request of theirs runs, and whose each is, by the session's number."""
        if not self._case.sessions:
            return {}
        kept = self._taps.allocation.kept_by_sessions(self._taps.requests.values())
        slots = [slot for name in self._case.sessions for slot in kept.get(name, ())]
        whose = [number for number, name in enumerate(self._case.sessions) for _ in kept.get(name, ())]
        return {"sessions": np.array(slots, np.int64), "whose": np.array(whose, np.int64)}

    def cached(self, iteration: int, of_sessions: Mapping[str, tuple[int, ...]]) -> None:
        """The rows that the prefix cache keeps of finished requests: as long a prefix of each as a new request would get.

        of_sessions: all that requests of sessions were asked, whose lists SGLang lengthens for the next ones, in place"""
        for name, request in self._taps.requests.items():
            tokens = [*of_sessions.get(name, request.origin_input_ids), *request.output_ids]
            slots = self._taps.allocation.cached_prefix(tokens, request.extra_key)
            tensors = {"tokens": np.array(tokens, np.int64), "slots": slots}
            if self._taps.allocation.has_windows:
                tensors["window_slots"] = self._taps.allocation.window_slots(slots)
            for part, pool in self._taps.pools.items():
                tensors[f"{part}_kv"] = pool.rows(slots)
            if self._taps.states is not None:
                tensors |= self._taps.states.of_prefixes(tokens)
            self._recorder.add(name, 0, "cached", when=When(iteration), tensors=tensors)

    def poison_all(self) -> None:
        for pool in self._taps.pools.values() if self._taps.poisons else ():
            pool.poison_all()
        if self._taps.poisons and self._taps.states is not None:
            self._taps.states.poison_all()
        if self._taps.host_tier is not None:
            self._taps.host_tier.poison_all()

    @property
    def copying(self) -> bool:
        """Whether the prefix cache still copies rows to the host or back: it is not to be flushed then."""
        return self._taps.host_tier is not None and self._taps.host_tier.copying > 0

    def poison_freed(self, free: Array) -> None:
        """Until now free slots hold plausible rows of whichever request had them."""
        if not self._taps.records:
            return
        allocation = self._taps.allocation
        used = allocation.used(free)
        freed = allocation.freed(free, used)
        for pool in self._taps.pools.values():
            pool.poison(freed, used)
        if self._taps.states is not None:
            self._taps.states.poison(self._taps.states.free())
        if self._taps.host_tier is not None:
            self._taps.host_tier.poison_free()
