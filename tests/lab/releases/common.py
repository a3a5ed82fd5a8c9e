"""Cases that every release can run: one chain of drafts, pages of one slot, no tree, no prefix cache, no events.

What they emit must be the same everywhere, token for token, and what the target alone would say: the bugs of the ledger that
all of these releases have or had change drafts, and verification repairs those.
"""

from random import Random

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.families.dimensions.dimension import tokens

COUNT = 100
_OF_A_MODEL = 20


def common_cases(model: str = "") -> tuple[Case, ...]:
    """All of them; or some, of this model."""
    return tuple(common_case(seed, model) for seed in range(_OF_A_MODEL if model else COUNT))


def common_case(seed: int, model: str = "") -> Case:
    """1-3 requests of 1-40 prompt tokens, in chunks or not, one after the other or at once; 1-4 draft steps."""
    random = Random(seed)
    requests = tuple(
        Request(
            id=f"r{number}",
            prompt=tokens(random.randrange(1 << 30), random.randint(1, 40), 96),
            max_new_tokens=random.randint(1, 12),
            arrive=random.choice((0, 0, number)),
        )
        for number in range(random.randint(1, 3))
    )
    return Case(
        name=f"common-{seed}{f'-{model}' if model else ''}",
        model=model or ("llama-tiny", "llama-gqa")[seed // 4 % 2],
        num_steps=1 + seed % 4,  # an engine for each model and number of steps: eight for all cases
        chunked_prefill_size=(1024, 8)[seed % 2],
        requests=requests,
    )
