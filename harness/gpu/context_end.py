"""Live, found by eagletwin on a GPU: with FlashAttention in graphs, a request at its context's end spoils the one beside it.

The table that tells verify where a request's KV rows lie has as many columns as the context is long. Verify needs one for each
row of the request and for each draft: near the end of the context more than that. From 0.5.15 to 0.5.21 what builds the table
stores them all the same, in the columns of the next request's row, which then attends to a stranger's rows: its *output*
changes (docs/findings/context-end.md). With overlap a request that is done takes part in one more round, so nearly every one
that ends there does it. Upstream: issue #34239, PR #35985 (open), which have it as an illegal access.

No CPU has FlashAttention, so it is no entry of the ledger: `gpu plan --attention fa3 --faults` has both sides.
"""

from msgspec.structs import replace

from eagletwin.cases.strategies import tokens
from eagletwin.harness.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.patch import Edit, Patch

from .campaign import Job
from .plan import MODES

# A candidate fix: tables as wide as the rows of req_to_token that they are made of, which have room for drafts.
WIDER_TABLES = Patch(
    name="wider-page-tables",
    edits=(
        Edit(
            target="sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.__init__",
            match="self.max_context_len = model_runner.model_config.context_len",
            replacement="self.max_context_len = model_runner.req_to_token_pool.req_to_token.shape[1]",
        ),
    ),
)
# Of these cases every one has a round, without overlap too, in which drafts reach beyond the context, and a request behind it.
_SEEDS = {"llama-tiny": (3, 7), "llama-mtp": (1, 3, 5, 6, 7)}


def _case(model: str, seed: int, page_size: int) -> Case:
    """Four requests that come to the end of their context, 16 tokens, at about the same time."""
    return Case(
        name=f"context-end-{seed}",
        model=model,
        num_steps=4 if model == "llama-mtp" else 5,  # drafts that reach beyond the context: it has four layers
        page_size=page_size,
        requests=tuple(
            Request(id="abcd"[number], prompt=tokens(seed * 8 + number, 9 - number, 96), max_new_tokens=5 + number)
            for number in range(4)
        ),
        engine=EngineSettings(sglang=SGLangSettings(context_length=16)),
    )


def context_end() -> list[Job]:
    """As the release is, with tables that are wide enough, and as it is with Triton's attention."""
    sides = (("released", "fa3", ()), ("mended", "fa3", (WIDER_TABLES,)), ("triton", "triton", ()))
    return [
        Job(
            name=f"context-end/{model}-page{page_size}-{mode}/{word}",
            mode=replace(MODES[mode], dtype="bfloat16", attention=attention),
            cases=tuple(_case(model, seed, page_size) for seed in seeds),
            patches=patches,
        )
        for mode in ("graphs", "overlap")
        for model, seeds in _SEEDS.items()
        for page_size in (1, 4)
        for word, attention, patches in sides
    ]
