"""Cases drawn by a simple seeded generator: the same seed gives the same case, on any machine.

A plain sweep over what the chain meets: page sizes, chunk sizes, batches whose requests come and go, shared prefixes.
"""

from random import Random

from eagletwin.harness.case import Case, EngineSettings, Request, SGLangSettings, check_case
from eagletwin.harness.models.recipes import RECIPES


def drawn_case(seed: int) -> Case:
    """1-3 requests of 1-40 prompt tokens, page size 1 or 4, num_steps 1-5, chunks from one page to longer than any prompt."""
    random = Random(seed)
    model = random.choice(sorted(RECIPES))
    page_size = random.choice((1, 4))
    vocabulary = RECIPES[model].target.vocab_size

    def tokens(count: int) -> list[int]:
        return [random.randrange(vocabulary) for _ in range(count)]

    common = tokens(random.choice((0, 0, 5, 12, 21)))  # half of the cases share no prefix
    requests = []
    for number in range(random.randint(1, 3)):
        length = random.randint(1, 40)
        shared = common[: length - 1] if random.random() < 0.7 else []
        requests.append(
            Request(
                id="abc"[number],
                prompt=tuple(shared + tokens(length - len(shared))),
                max_new_tokens=random.randint(1, 16),
                arrive=random.choice((0, 0, 1, 3, 6)),
            )
        )
    case = Case(
        name=f"drawn-{seed}",
        model=model,
        num_steps=random.randint(1, 5),
        page_size=page_size,
        chunked_prefill_size=page_size * random.choice((1, 2, 3, 5, 8, 16, 64)),
        requests=tuple(requests),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=random.random() < 0.5, max_total_tokens=512)),
    )
    check_case(case, case.name)
    return case
