"""A running vLLM server, by its HTTP API alone.

vLLM tells how many drafts each verify step of a request accepted (`--per-request-spec-decode-metrics detailed`, release 0.33.0
and later), and leaves out steps that verified none: it does not draft where no request can use a draft, and cuts drafts that a
budget of tokens does not hold. A stream has a chunk a step, so the two together say where each round began.
"""

import uuid
from collections.abc import Sequence
from typing import Any

from eagletwin.harness.core.errors import HarnessError, InputError

from .server import Answer, Server, Started


class VllmServer(Server):
    _salt = ""

    def started(self) -> Started:
        """By /server_info, which a server has in its developer mode alone."""
        config = self.get("/server_info?config_format=json")["vllm_config"]
        drafts, model = config.get("speculative_config") or {}, config["model_config"]
        cache, schedule = config["cache_config"], config["scheduler_config"]
        if not drafts:
            raise InputError(
                f"the server at {self.url} was started without speculative decoding",
                consequence="it has no acceptance",
                remedy="start it with --speculative-config and a draft",
            )
        if (config.get("observability_config") or {}).get("per_request_spec_decode_metrics") != "detailed":
            raise InputError(
                f"the server at {self.url} does not count the rounds of a request",
                consequence="what it used cannot be compared with what the pair deserves",
                remedy="start it with --per-request-spec-decode-metrics detailed (release 0.33.0 and later)",
            )
        if (how := drafts.get("rejection_sample_method") or "standard") not in ("standard", "block"):
            raise InputError(
                f"the server at {self.url} accepts drafts by the method {how}",
                consequence="it accepts drafts that its target does not say, so no round can be judged",
                remedy="start it with the rejection_sample_method standard",
            )
        steps, budget = int(drafts["num_speculative_tokens"]), int(schedule["max_num_batched_tokens"])
        return Started(
            engine="vllm",
            version=str(self.get("/version").get("version", "")),
            algorithm=str(drafts["method"]),
            num_steps=steps,
            topk=1,
            num_draft_tokens=steps + 1,
            chunk=budget if schedule.get("enable_chunked_prefill") else 0,
            page_size=int(cache["block_size"]),
            dtype=str(model["dtype"]),
            target=str(model["model"]),
            draft=str(drafts.get("model") or ""),
            overlap=bool(schedule.get("async_scheduling")),
            graphs=not model.get("enforce_eager"),
            rejection_sampling=how == "block" or drafts.get("draft_sample_method", "greedy") != "greedy",
            quantization=str(model.get("quantization") or ""),
            kv_dtype=str(cache.get("cache_dtype") or "auto"),
            max_running=int(schedule["max_num_seqs"]),
        )

    def flush(self) -> None:
        """What follows has a salt of its own, by which vLLM's prefix cache tells prompts apart."""
        self._salt = uuid.uuid4().hex

    def ask(self, prompt: Sequence[int], new_tokens: int, temperature: float, *, whole: bool) -> Answer:
        asked = {
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": temperature,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._salt:
            asked["cache_salt"] = self._salt
        if whole:
            asked |= {"top_p": 1.0, "top_k": -1}
        chunks, finish, usage, metrics = list[list[int]](), "", dict[str, Any](), dict[str, Any]()
        for said in self.post("/v1/completions", asked):
            for choice in said.get("choices") or ():
                chunks.append(list(choice.get("token_ids") or ()))
                finish = choice.get("finish_reason") or finish
            usage, metrics = said.get("usage") or usage, said.get("metrics") or metrics
        if not finish:
            raise self.failure("ended its answer before it was complete")
        tokens = tuple(token for chunk in chunks for token in chunk)
        steps = metrics.get("speculative_decoding")
        if steps is None and len(tokens) > 1:
            raise HarnessError(
                f"the server at {self.url} does not say how many rounds an answer took",
                consequence="what it used cannot be compared with what the pair deserves",
                remedy="start it with --per-request-spec-decode-metrics detailed",
            )
        rounds, starts, drafted = read_steps(len(prompt), [len(chunk) for chunk in chunks if chunk], steps or {})
        histogram = (steps or {}).get("acceptance_histogram")
        return Answer(
            prompt=tuple(prompt),
            tokens=tokens,
            rounds=rounds,
            starts=starts,
            accepted=None if histogram is None else tuple(histogram),
            cached=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            finish=finish,
            drafted=drafted,
        )


def read_steps(
    size: int, chunks: Sequence[int], steps: dict[str, Any]
) -> tuple[int, tuple[int, ...] | None, tuple[int, ...] | None]:
    """Rounds; where each began and how many drafts it verified, if the two accounts fit.

    size: tokens of the prompt; chunks: tokens of each chunk of the stream, the prefill's first; steps: vLLM's account of the
    steps that verified drafts. The last of these may have accepted more than the text has room for.
    """
    accepted, verified = list(steps.get("per_step_accepted") or ()), list(steps.get("per_step_drafted") or ())
    starts, drafted, committed, place = list[int](), list[int](), size, 0
    for chunk in chunks[1:]:
        starts.append(committed)
        last = len(starts) == len(chunks) - 1
        if place < len(accepted) and (accepted[place] + 1 == chunk or (last and accepted[place] + 1 > chunk)):
            drafted.append(verified[place])
            place += 1
        else:
            drafted.append(0)
            if chunk != 1:
                break
        committed += chunk
    else:
        if place == len(accepted) and chunks[:1] in ([1], []):
            return len(starts), tuple(starts), tuple(drafted)
    tokens = sum(chunks) - 1  # beside the prefill's
    return len(accepted) + max(tokens - sum(accepted) - len(accepted), 0), None, None
