"""Requests that sample, and how SGLang samples: rejection sampling, acceptance thresholds, and coins that are hashed."""

from collections.abc import Iterator

from eagletwin.harness.core.case import Case
from eagletwin.harness.families import RECIPES

from .dimension import Dimension, Refusal, of_requests, of_settings, put, with_requests, with_settings


def _rejection_refusals(case: Case) -> Iterator[Refusal]:
    """What SGLang refuses when it starts, or would silently leave out."""
    settings, recipe = case.engine.sglang, RECIPES[case.model]
    if not settings.rejection_sampling:
        return
    if case.topk > 1:
        yield f"rejection_sampling with topk {case.topk}: SGLang has it for chains only", "use topk 1"
    if recipe.frozen:
        yield (
            f"rejection_sampling with {case.model}: SGLang keeps no probabilities of such a draft, and ends at the "
            "first request that samples",
            "leave it out",
        )
    if (settings.accept_single, settings.accept_acc) != (1, 1):
        yield "rejection_sampling with thresholds, which it does not use", "leave one of them out"
    if recipe.draft_vocab_size is not None:
        yield (
            f"rejection_sampling with {case.model}, whose draft knows {recipe.draft_vocab_size} tokens and its target more",
            "use a model with one vocabulary, such as llama-eagle3-full",
        )


def _seed_refusals(case: Case) -> Iterator[Refusal]:
    hashed = case.engine.sglang.deterministic
    if case.engine.vllm is not None:  # it hashes the seed of each request, its own where none is given
        return
    for request in (request for request in case.requests if request.sampling is not None):
        assert request.sampling is not None
        if hashed and request.sampling.min_p > 0:
            yield (
                f"request {request.id!r} has min_p, and deterministic is true: SGLang's sampler refuses the two",
                "leave one of them out",
            )
        if hashed != (request.sampling.seed is not None):
            yield (
                f"request {request.id!r} has {'no seed' if hashed else 'a seed'}, and deterministic is {str(hashed).lower()}",
                "SGLang hashes coins from seeds with engine.sglang.deterministic, and only then: give both or neither",
            )


SAMPLING = of_requests(
    "sampling",
    "sampling",
    key="sampling",
    plain="all are greedy",
    kinds={"samples": lambda case: any(request.sampling is not None for request in case.requests)},
)
REJECTION = of_settings(
    "rejection_sampling",
    "rejection sampling",
    key="rejection",
    kind=True,
    plain="the target alone samples",
    modes={"pp": "not driven"},
    refusals=_rejection_refusals,
    argument="speculative_use_rejection_sampling",
)
THRESHOLDS = Dimension(
    name="threshold",
    words="accept thresholds",
    key="thresholds",
    has=lambda case: (case.engine.sglang.accept_single, case.engine.sglang.accept_acc) != (1, 1),
    size=lambda case: (case.engine.sglang.accept_single, case.engine.sglang.accept_acc),
    says=lambda case: f"accept_single {case.engine.sglang.accept_single:g}, accept_acc {case.engine.sglang.accept_acc:g}",
    plain="1",
    without=lambda case: iter([with_settings(case, accept_single=1.0, accept_acc=1.0)]),
    arguments=lambda case: {
        name: at
        for name, at in (
            ("speculative_accept_threshold_single", case.engine.sglang.accept_single),
            ("speculative_accept_threshold_acc", case.engine.sglang.accept_acc),
        )
        if at < 1
    },
)
DETERMINISTIC = of_settings(
    "deterministic",
    "hashed coins",
    key="deterministic",
    plain="coins that are drawn",
    # seeds belong to hashed coins
    without=lambda case: iter(
        [with_settings(with_requests(case, lambda request: put(request, "seed", None)), deterministic=False)]
    ),
    refusals=_seed_refusals,
    argument="enable_deterministic_inference",
)
DIMENSIONS = (SAMPLING, DETERMINISTIC, THRESHOLDS, REJECTION)
