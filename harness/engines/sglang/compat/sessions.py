"""What SGLang's streaming sessions keep of the pool. From 0.5.22 on the prefix cache owns
their records; before that a session keeps a copy of its last request's, and is not driven.
"""

from typing import Any

from ..blame import NotDriven


def prepare(shims: list[str]) -> None:
    """Before a scheduler with sessions is built. Raises NotDriven for a release that keeps them in another way."""
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    if not hasattr(BasePrefixCache, "session_records"):
        raise NotDriven(
            "streaming sessions: this release keeps what is theirs in another place (from 0.5.22 on it is where it is known)"
        )
    shims.append("SessionController: ends sessions that wait for their last request in each iteration, and not once a second")


def end_those_that_wait(scheduler: Any) -> None:
    """SGLang looks once a second for sessions that were closed while a request of theirs ran: a clock would decide in which
    iteration their slots become free."""
    scheduler.session_controller._last_reap_time = float("-inf")


def records(scheduler: Any) -> dict[str, Any]:
    """What each session keeps of the pool, by its name: its record of req_to_token and of lengths, as of a request. A request
    of the session that runs has the same one."""
    kept: dict[str, Any] = getattr(scheduler.tree_cache, "session_records", dict)()
    return kept
