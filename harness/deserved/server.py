"""A running SGLang server, by its HTTP API alone: what it was started with, and what it answers to a prompt of token ids.

An answer says how many rounds it took. Streamed with an interval of one, it also says where each round began: a server sends
what a round has committed when the round is over. Chunks that arrive together are told by the count, which does not fit then.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

from msgspec import Struct

from eagletwin.harness.core.errors import HarnessError, InputError

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
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: int
    starts: tuple[int, ...] | None
    accepted: tuple[int, ...] | None
    cached: int
    finish: str


class HttpServer:
    """A server at a base address such as http://127.0.0.1:30000."""

    def __init__(self, url: str, seconds: float = SECONDS, idle_seconds: float = 30.0) -> None:
        self.url, self.seconds, self.idle_seconds = url.rstrip("/"), seconds, idle_seconds

    def started(self) -> Started:
        """What it was started with. Raises InputError where no SGLang with speculative decoding answers."""
        info = self._json("/server_info", "/get_server_info")
        if "speculative_algorithm" not in info:
            raise InputError(
                f"{self.url} answers, but not as an SGLang server does",
                consequence="it is not known what it drafts",
                remedy="name the address that SGLang's launch_server listens on",
            )
        if not info["speculative_algorithm"]:
            raise InputError(
                f"the server at {self.url} was started without speculative decoding",
                consequence="it has no acceptance",
                remedy="start it with --speculative-algorithm and a draft",
            )
        return Started(
            version=str(info.get("version", "")),
            algorithm=str(info["speculative_algorithm"]),
            num_steps=int(info.get("speculative_num_steps") or 0),
            topk=int(info.get("speculative_eagle_topk") or 1),
            num_draft_tokens=int(info.get("speculative_num_draft_tokens") or 0),
            chunk=None if (chunk := info.get("chunked_prefill_size")) is None else max(0, int(chunk)),
            page_size=int(info.get("page_size") or 1),
            dtype=str(info.get("dtype", "")),
            target=str(info.get("model_path", "")),
            draft=str(info.get("speculative_draft_model_path") or ""),
            overlap=not info.get("disable_overlap_schedule", False),
            graphs=not info.get("disable_cuda_graph", False),
            rejection_sampling=bool(info.get("speculative_use_rejection_sampling", False)),
            quantization=str(info.get("quantization") or ""),
            kv_dtype=str(info.get("kv_cache_dtype") or "auto"),
            max_running=int(info.get("max_running_requests") or 0),
            host_cache=bool(info.get("enable_hierarchical_cache", False)),
            updated=self._was_updated(info),
        )

    def _was_updated(self, info: Mapping[str, Any]) -> bool:
        """An update moves the path of the model. /server_info shows it in older releases alone, and in none the tokenizer's,
        which is the same unless --tokenizer-path says otherwise: an update is then supposed."""
        now = self._json("/model_info", "/get_model_info").get("model_path")
        return len({path for path in (now, info.get("model_path"), info.get("tokenizer_path")) if path}) > 1

    def flush(self) -> None:
        """Empty its prefix cache, so that what follows is cold. A request that it has just answered may still be ending.

        Raises HarnessError for one that is never idle.
        """
        request = urllib.request.Request(f"{self.url}/flush_cache", method="POST", data=b"")
        end = time.monotonic() + self.idle_seconds
        while True:
            try:
                with self._open(request):
                    return
            except _Refused as error:
                if time.monotonic() > end:
                    raise HarnessError(
                        f"the server at {self.url} keeps its prefix cache, since it was never idle for {self.idle_seconds:g} s",
                        consequence="a prompt would find what earlier ones left; what was measured before is kept",
                        remedy="send it no other requests meanwhile",
                    ) from error
                time.sleep(0.1)

    def ask(self, prompt: Sequence[int], new_tokens: int, sampling: Mapping[str, object]) -> Answer:
        """Its answer to a prompt of token ids. Raises HarnessError if it does not answer to the end, or without counts."""
        asked = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": new_tokens, "stream_interval": 1, **sampling},
            "stream": True,
        }
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        counts, said = [0], None
        for said in self._events(request):
            counts.append(int(said["meta_info"]["completion_tokens"]))
        if said is None or said["meta_info"].get("finish_reason") is None:
            raise self._server_error("ended its answer before it was complete")
        return _answer(prompt, counts, said)

    def _events(self, request: urllib.request.Request) -> Iterator[dict[str, Any]]:
        with self._open(request) as reply:
            try:
                for line in reply:
                    data = line.removeprefix(b"data: ").strip()
                    if line.startswith(b"data: ") and data != b"[DONE]":
                        yield self._event(data)
            except (OSError, http.client.HTTPException) as error:
                raise self._server_error(f"broke off: {error}") from error

    def _event(self, data: bytes) -> dict[str, Any]:
        try:
            said = json.loads(data)
        except ValueError as error:
            raise self._server_error("streamed something that is no JSON") from error
        if not isinstance(said, dict) or "error" in said or "output_ids" not in said:
            raise self._server_error(f"refused the prompt: {said.get('error', said) if isinstance(said, dict) else said}")
        return said

    def _json(self, *paths: str) -> dict[str, Any]:
        """The first of these that there is: a later release renamed it."""
        for path in paths:
            try:
                with self._open(urllib.request.Request(self.url + path)) as reply:
                    said = json.load(reply)
                    return said if isinstance(said, dict) else {}
            except _Missing:
                continue
            except ValueError:
                return {}
        return {}

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            return urllib.request.urlopen(request, timeout=self.seconds)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise _Missing from error
            kind = _Refused if error.code == 400 else HarnessError
            raise self._server_error(f"says {error.code}: {error.read(300).decode(errors='replace').strip()}", kind) from error
        except ValueError as error:  # no address at all
            raise InputError(
                f"{self.url} is no address: {error}",
                consequence="no server was asked",
                remedy="name it as http://HOST:PORT",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._server_error(f"does not answer: {getattr(error, 'reason', error)}") from error

    def _server_error(self, what: str, kind: type[HarnessError] = HarnessError) -> HarnessError:
        return kind(
            f"the server at {self.url} {what}",
            consequence="the prompts after this one were not measured; what was measured before is kept",
            remedy="see what the server's own log says, and ask it again",
        )


class _Missing(Exception):
    """The server has no such path."""


class _Refused(HarnessError):
    """The server does not do what it was asked for."""


def _answer(prompt: Sequence[int], counts: Sequence[int], said: Mapping[str, Any]) -> Answer:
    meta = said["meta_info"]
    tokens = tuple(said["output_ids"][-int(meta["completion_tokens"]) :])
    rounds = meta.get("spec_verify_ct", 0 if len(tokens) == 1 else None)
    if rounds is None:
        raise HarnessError(
            "the server counts no verify rounds (spec_verify_ct)",
            consequence="what it used cannot be compared with what the pair deserves",
            remedy="use a release of SGLang that returns it in meta_info: 0.5.9 and later do",
        )
    sent = [count for before, count in pairwise(counts) if count > before]
    # One token from the prefill, then what each round committed. Chunks that were merged on their way make fewer.
    told = len(sent) == rounds + 1 and sent[0] == 1
    starts = tuple(len(prompt) + count - 1 for count in sent[:-1]) if told else None
    histogram = meta.get("spec_correct_drafts_histogram")
    return Answer(
        prompt=tuple(prompt),
        tokens=tokens,
        rounds=int(rounds),
        starts=starts,
        accepted=None if histogram is None else tuple(histogram),
        cached=int(meta.get("cached_tokens", 0)),
        finish=str((meta.get("finish_reason") or {}).get("type", "")),
    )


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
