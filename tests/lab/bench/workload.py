"""The benchmark's workload: plain cases of a stated size, the same for the same seed."""

from random import Random

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.families.dimensions.dimension import tokens


def sized_case(seed: int, *, batch: int, prompt: int, num_steps: int, topk: int = 1, max_new_tokens: int = 7) -> Case:
    """`batch` requests of `prompt` tokens each, all at once; 7 new tokens take about three rounds.

    A tree has as many nodes as its branches, each as long as num_steps, would have.
    """
    requests = tuple(
        Request(id=f"r{number}", prompt=tokens(seed * 64 + number, prompt, 96), max_new_tokens=max_new_tokens)
        for number in range(batch)
    )
    return _case(f"sized-{seed}", requests, num_steps, topk, topk * num_steps + 1)


def rate_case(seed: int, topk: int = 1, model: str = "llama-tiny") -> Case:
    """1-3 requests of 10-40 prompt tokens, about three rounds of three steps: what rates are stated for. A tree has 6 nodes.

    model: a recipe of 96 tokens or more
    """
    random = Random(seed)
    requests = tuple(
        Request(id=f"r{number}", prompt=tokens(random.randrange(1 << 30), random.randint(10, 40), 96), max_new_tokens=7)
        for number in range(random.randint(1, 3))
    )
    return replace(_case(f"rate-{seed}", requests, 3, topk, 6), model=model)


def _case(name: str, requests: tuple[Request, ...], num_steps: int, topk: int, num_draft_tokens: int) -> Case:
    return Case(
        name=name,
        model="llama-tiny",
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens if topk > 1 else 0,
        chunked_prefill_size=1024,
        requests=requests,
        engine=EngineSettings(sglang=SGLangSettings(max_total_tokens=4096, max_running_requests=16)),
    )
