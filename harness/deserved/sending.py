"""How prompts are put to a server: each by itself and cold, and once more behind that; then all together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from .server import Answer, HttpServer

Way = Literal["alone", "again", "together"]
WAYS: Mapping[Way, str] = {
    "alone": "by itself, with an empty prefix cache",
    "again": "by itself, once more",
    "together": "with others, from an empty prefix cache on",
}
_BY_ITSELF: tuple[Way, ...] = ("alone", "again")


@dataclass(frozen=True, slots=True)
class Sent:
    """One prompt, how it was sent, and the answer. beside: requests that were sent at once with it"""

    number: int
    way: Way
    answer: Answer
    beside: int = 0


def send(
    server: HttpServer,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    at_once: int,
    sampling: Mapping[str, object],
    kept: Callable[[Sent], None],
) -> Iterator[Sent]:
    """Put all prompts in each way. `kept` is called with every answer as it comes: none is lost if a later one fails."""
    for number, prompt in enumerate(prompts):
        server.flush()
        for way in _BY_ITSELF:
            yield _keep(Sent(number, way, server.ask(prompt, new_tokens, sampling)), kept)
    server.flush()
    with ThreadPoolExecutor(at_once) as pool:
        asked = [pool.submit(server.ask, prompt, new_tokens, sampling) for prompt in prompts]
        for number, answer in enumerate(asked):
            yield _keep(Sent(number, "together", answer.result(), min(at_once, len(prompts)) - 1), kept)


def _keep(sent: Sent, kept: Callable[[Sent], None]) -> Sent:
    kept(sent)
    return sent
