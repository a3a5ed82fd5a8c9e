"""A running server, by its HTTP API alone: what it was started with, and what it answers to a prompt of token ids.

An answer says how many rounds it took. Streamed with an interval of one, it also says where each round began: a server sends
what a round has committed when the round is over. Chunks that arrive together are told by the count, which does not fit then.
The API of each engine is in a file of its own.
"""

import http.client
import json
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, cast

from msgspec import Struct

from eagletwin.harness.core.errors import HarnessError, InputError
from eagletwin.harness.core.run_spec import Engine

SECONDS = 600.0  # for an answer; the first one of a server may wait for kernels to be compiled


class Started(Struct, frozen=True, kw_only=True):
    """What a server was started with, as far as it decides what is drafted. 0 and "" where it does not say.

    chunk        tokens that it prefills at once; 0: any number; None: it does not say
    max_running  requests that it runs at once, at most
    host_cache   whether it keeps rows in the host's memory as well (--enable-hierarchical-cache)
    updated      whether it was given weights from another folder while it ran
    """

    version: str
    algorithm: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    chunk: int | None
    page_size: int
    dtype: str
    target: str
    draft: str
    overlap: bool
    graphs: bool
    rejection_sampling: bool = False
    quantization: str = ""
    kv_dtype: str = "auto"
    max_running: int = 0
    host_cache: bool = False
    updated: bool = False
    engine: Engine = "sglang"

    def computes_in(self, config: Mapping[str, Any]) -> Literal["float32", "bfloat16", "float16"]:
        """The type in which it runs a checkpoint of this configuration. Raises InputError where it quantizes.

        `auto` is the type that config.json names, and float16 for one of float32 (model_config.py, _get_and_verify_dtype).
        """
        quantizes = self.quantization or config.get("quantization_config") or self.kv_dtype not in ("", "auto")
        named = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        asked = self.dtype.lower().removeprefix("torch.") or "auto"
        found = {"half": "float16", "float": "float32"}.get(asked, asked)
        if found == "auto":
            found = "float16" if named == "float32" else named
        if quantizes or found not in ("float32", "bfloat16", "float16"):
            raise InputError(
                f"the server computes in {found}, with quantization {self.quantization or 'none'} and KV rows of type "
                f"{self.kv_dtype}; the checkpoint is {'' if config.get('quantization_config') else 'not '}quantized",
                consequence="how close two logits may be before its rounding decides is not known, so no round can be judged",
                remedy="serve the pair in bfloat16, float16 or float32, without --quantization and --kv-cache-dtype",
            )
        return cast("Literal['float32', 'bfloat16', 'float16']", found)


class Answer(Struct, frozen=True, kw_only=True):
    """What a server said to one prompt.

    tokens   what it emitted
    rounds   verify rounds that it counts; 0 where it emitted one token, which needs none
    starts   M of each round, if the stream tells them: tokens of the text committed before it, less one
    accepted how many rounds accepted 0, 1, .. drafts, if it says so
    cached   tokens of the prompt that it found in its prefix cache
    drafted  drafts that each of these rounds verified, where it is less than the server drafts; None: it does not say
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: int
    starts: tuple[int, ...] | None
    accepted: tuple[int, ...] | None
    cached: int
    finish: str
    drafted: tuple[int, ...] | None = None


class Server(ABC):
    """A server at a base address such as http://127.0.0.1:30000."""

    def __init__(self, url: str, seconds: float = SECONDS, idle_seconds: float = 30.0) -> None:
        self.url, self.seconds, self.idle_seconds = url.rstrip("/"), seconds, idle_seconds

    @abstractmethod
    def started(self) -> Started:
        """What it was started with. Raises InputError where it does not draft."""

    @abstractmethod
    def flush(self) -> None:
        """Have what follows find nothing of earlier prompts in its prefix cache. Raises HarnessError where that cannot be."""

    @abstractmethod
    def ask(self, prompt: Sequence[int], new_tokens: int, temperature: float, *, whole: bool) -> Answer:
        """Its answer to a prompt of token ids. whole: it draws from all tokens, whatever the checkpoint says.

        Raises HarnessError if it does not answer to the end, or without counts.
        """

    def post(self, path: str, asked: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """What it streams in answer to this."""
        request = urllib.request.Request(self.url + path, json.dumps(asked).encode(), {"Content-Type": "application/json"})
        with self._open(request) as reply:
            try:
                for line in reply:
                    data = line.removeprefix(b"data: ").strip()
                    if line.startswith(b"data: ") and data != b"[DONE]":
                        yield self._event(data)
            except (OSError, http.client.HTTPException) as error:
                raise self.failure(f"broke off: {error}") from error

    def _event(self, data: bytes) -> dict[str, Any]:
        try:
            said = json.loads(data)
        except ValueError as error:
            raise self.failure("streamed something that is no JSON") from error
        if not isinstance(said, dict) or said.get("error"):
            raise self.failure(f"refused the prompt: {said.get('error', said) if isinstance(said, dict) else said}")
        return said

    def get(self, *paths: str) -> dict[str, Any]:
        """The first of these that there is: a later release renamed it."""
        for path in paths:
            try:
                with self._open(urllib.request.Request(self.url + path)) as reply:
                    said = json.load(reply)
                    return said if isinstance(said, dict) else {}
            except Missing:
                continue
            except ValueError:
                return {}
        return {}

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            return urllib.request.urlopen(request, timeout=self.seconds)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise Missing from error
            kind = BadRequest if error.code == 400 else HarnessError
            raise self.failure(f"says {error.code}: {error.read(300).decode(errors='replace').strip()}", kind) from error
        except ValueError as error:  # no address at all
            raise InputError(
                f"{self.url} is no address: {error}",
                consequence="no server was asked",
                remedy="name it as http://HOST:PORT",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self.failure(f"does not answer: {getattr(error, 'reason', error)}") from error

    def failure(self, what: str, kind: type[HarnessError] = HarnessError) -> HarnessError:
        return kind(
            f"the server at {self.url} {what}",
            consequence="the prompts after this one were not measured; what was measured before is kept",
            remedy="see what the server's own log says, and ask it again",
        )


class Missing(Exception):
    """The server has no such path."""


class BadRequest(HarnessError):
    """The server does not do what it was asked for."""


# How prompts are put to a server: each by itself and cold, and once more behind that; then all together.

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
    server: Server,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    at_once: int,
    temperature: float,
    whole: bool,
    kept: Callable[[Sent], None],
) -> Iterator[Sent]:
    """Put all prompts in each way. `kept` is called with every answer as it comes: none is lost if a later one fails."""
    for number, prompt in enumerate(prompts):
        server.flush()
        for way in _BY_ITSELF:
            yield _keep(Sent(number, way, server.ask(prompt, new_tokens, temperature, whole=whole)), kept)
    server.flush()
    with ThreadPoolExecutor(at_once) as pool:
        asked = [pool.submit(server.ask, prompt, new_tokens, temperature, whole=whole) for prompt in prompts]
        for number, answer in enumerate(asked):
            yield _keep(Sent(number, "together", answer.result(), min(at_once, len(prompts)) - 1), kept)


def _keep(sent: Sent, kept: Callable[[Sent], None]) -> Sent:
    kept(sent)
    return sent
