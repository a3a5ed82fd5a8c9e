"""A server that answers as SGLang's does, or as vLLM's, and what one says that it was started with."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from eagletwin.harness.deserved.server import Started
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import draft_chain
from eagletwin.reference.llama import target_rows

# What a server says of how it was started, for tests that ask no server.

STARTED = Started(
    version="0.5.23",
    algorithm="EAGLE",
    num_steps=3,
    topk=1,
    num_draft_tokens=4,
    chunk=0,
    page_size=1,
    dtype="float32",
    target="",
    draft="",
    overlap=True,
    graphs=True,
)


# A server that speaks as SGLang's does, and whose target, drafts and rounds are the reference's: healthy, or with a fault.

MODEL, STEPS, CHUNK = "llama-gqa", 3, 16
INFO: dict[str, Any] = {
    "version": "0.5.12",
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": STEPS,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": STEPS + 1,
    "chunked_prefill_size": CHUNK,
    "dtype": "float32",
}
VLLM_INFO: dict[str, Any] = {
    "vllm_config": {
        "speculative_config": {"method": "eagle", "num_speculative_tokens": STEPS, "rejection_sample_method": "standard"},
        "model_config": {"model": "target", "dtype": "float32", "enforce_eager": False},
        "cache_config": {"block_size": 16, "cache_dtype": "auto"},
        "scheduler_config": {"max_num_batched_tokens": CHUNK, "max_num_seqs": 4, "enable_chunked_prefill": True},
        "observability_config": {"per_request_spec_decode_metrics": "detailed"},
    }
}
Prompt = tuple[int, ...]


@lru_cache(maxsize=256)
def text_of(prompt: Prompt, count: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """A prompt with what the target says to it, and the states that the draft consumes."""
    weights, shape = model_pair(MODEL).reference_target(), RECIPES[MODEL].target
    tokens = torch.tensor(prompt)
    for _ in range(count):
        tokens = torch.cat([tokens, target_rows(weights, shape, tokens).logits[-1:].argmax(-1)])
    return tuple(tokens.tolist()), target_rows(weights, shape, tokens).hidden


class Behaviour:
    """What is wrong with the server. Each returns or holds what a healthy one does."""

    def __init__(self) -> None:
        self.info: dict[str, Any] | None = dict(INFO)
        self.model_info: dict[str, Any] | None = None
        self.refuses: Callable[[Prompt, int], bool] = lambda prompt, cached: False  # this prompt's rounds accept nothing
        self.counts = True
        self.merges = False  # chunks of a stream arrive together
        self.dies_after = 10**9
        self.busy = 0  # times that it refuses to empty its cache
        self.rounds_off: Callable[[], AbstractContextManager[object]] = nullcontext  # while it drafts
        self.says: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda tokens: tokens


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        behaviour = self.server.behaviour
        known = {"/server_info": behaviour.info, "/model_info": behaviour.model_info, "/version": {"version": "0.33.0"}}
        info = known.get(self.path.partition("?")[0])
        self._send(404 if info is None else 200, json.dumps(info).encode())

    def do_POST(self) -> None:
        if self.path == "/flush_cache":
            self.server.behaviour.busy -= 1
            if self.server.behaviour.busy >= 0:
                self._send(400, b"Flush cache failed.")
                return
            self.server.cached.clear()
            self._send(200, b"flushed")
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked += 1
        self.send_response(200)
        self.end_headers()
        if self.path == "/v1/completions":
            salt = asked["cache_salt"]
            events = self.server.answer(tuple(asked["prompt"]), asked["max_tokens"], salt)
            for event in as_vllm(list(events), merges=self.server.behaviour.merges):
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
            return
        if self.server.asked > self.server.behaviour.dies_after:
            self.wfile.write(b'data: {"output_ids": [1], "meta_info": {"completion_tokens": 1, "finish_reason": null}}\n\n')
            return
        for event in self.server.answer(tuple(asked["input_ids"]), asked["sampling_params"]["max_new_tokens"]):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour, self.cached, self.asked = behaviour, set[tuple[str, Prompt]](), 0

    def answer(self, prompt: Prompt, count: int, salt: str = "") -> Iterator[dict[str, Any]]:
        text, hidden = text_of(prompt, count)
        cached = len(prompt) - 1 if (salt, prompt) in self.cached else 0
        self.cached.add((salt, prompt))
        head, committed, sent, rounds = model_pair(MODEL).reference_heads(RECIPES[MODEL])[0], len(prompt), [1], 0
        while committed < len(text) - 1:
            with self.behaviour.rounds_off():
                drafted = draft_chain(head, torch.tensor(text[: committed + 1]), hidden, STEPS).drafted.tolist()
            accepted = 0
            while accepted < STEPS and drafted[accepted : accepted + 1] == list(text[committed + 1 :][accepted : accepted + 1]):
                accepted += 1
            if self.behaviour.refuses(prompt, cached):
                accepted = 0
            committed, rounds = min(committed + accepted + 1, len(text) - 1), rounds + 1
            sent.append(committed + 1 - len(prompt))
        emitted = self.behaviour.says(text[len(prompt) :])
        for number in sent[-1:] if self.behaviour.merges and not salt else sent:
            meta: dict[str, Any] = {"completion_tokens": number, "cached_tokens": cached, "finish_reason": None}
            if number == sent[-1]:
                meta["finish_reason"] = {"type": "length"}
                if self.behaviour.counts:
                    meta["spec_verify_ct"] = rounds
            yield {"output_ids": list(emitted[:number]), "meta_info": meta}


def as_vllm(events: list[dict[str, Any]], *, merges: bool) -> Iterator[dict[str, Any]]:
    """The same answer as vLLM streams it. A step after which one token is left verifies nothing, and is in no account."""
    tokens, meta = events[-1]["output_ids"], events[-1]["meta_info"]
    ends = [len(event["output_ids"]) for event in events]
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    begin = 0
    for size in [len(tokens)] if merges else sizes:
        begin += size
        reason = "length" if begin == len(tokens) else None
        yield {"choices": [{"token_ids": tokens[begin - size : begin], "finish_reason": reason}]}
    steps = sizes[1:-1] if sizes[-1] == 1 else sizes[1:]
    told = {"per_step_accepted": [size - 1 for size in steps], "per_step_drafted": [STEPS] * len(steps)}
    metrics = {"speculative_decoding": told} if "spec_verify_ct" in meta else {}
    yield {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": meta["cached_tokens"]}}, "metrics": metrics}


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """The address of such a server, for as long as it is needed."""
    server = _Server(behaviour)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
