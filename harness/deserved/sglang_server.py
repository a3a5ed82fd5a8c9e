"""A running SGLang server, by its HTTP API alone."""

import time
import urllib.request
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from eagletwin.harness.core.errors import HarnessError, InputError

from .server import Answer, BadRequest, Server, Started


class SGLangServer(Server):
    def started(self) -> Started:
        info = self.get("/server_info", "/get_server_info")
        if not info.get("speculative_algorithm"):
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
        now = self.get("/model_info", "/get_model_info").get("model_path")
        return len({path for path in (now, info.get("model_path"), info.get("tokenizer_path")) if path}) > 1

    def flush(self) -> None:
        """Empty its prefix cache. A request that it has just answered may still be ending: one that is never idle refuses."""
        request = urllib.request.Request(f"{self.url}/flush_cache", method="POST", data=b"")
        end = time.monotonic() + self.idle_seconds
        while True:
            try:
                with self._open(request):
                    return
            except BadRequest as error:
                if time.monotonic() > end:
                    raise HarnessError(
                        f"the server at {self.url} keeps its prefix cache, since it was never idle for {self.idle_seconds:g} s",
                        consequence="a prompt would find what earlier ones left; what was measured before is kept",
                        remedy="send it no other requests meanwhile",
                    ) from error
                time.sleep(0.1)

    def ask(self, prompt: Sequence[int], new_tokens: int, temperature: float, *, whole: bool) -> Answer:
        sampling: dict[str, object] = {"max_new_tokens": new_tokens, "stream_interval": 1, "temperature": temperature}
        sampling |= {"ignore_eos": False} | ({"top_p": 1.0, "top_k": -1} if whole else {})
        counts, said = [0], None
        for said in self.post("/generate", {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}):
            if "output_ids" not in said:
                raise self.failure(f"refused the prompt: {said}")
            counts.append(int(said["meta_info"]["completion_tokens"]))
        if said is None or said["meta_info"].get("finish_reason") is None:
            raise self.failure("ended its answer before it was complete")
        return _answer(prompt, counts, said)


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
