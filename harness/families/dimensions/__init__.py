"""The dimensions: a file for each thing that a case can have, with its DIMENSION, or DIMENSIONS where several share code.

All that depends on what a case can have is derived from DIMENSIONS: what a search draws, which cases are valid, the features of
`fuzz --only` and `bisect --features`, shrinking, the names for `Case.exercises`, and how known bugs are matched.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from .dimension import Dimension

# Names that `Case.exercises` may use for any case. A dimension has those that cases without it cannot exercise. They are here
# and not in the judge, so that a case can be validated without it.

GENERAL: dict[str, str] = {
    "chunked_prefill": "a prompt was split into two chunks or more",
    "chunk_tail_differs": "at the end of a non-final chunk, the target's argmax is not the next prompt token",
    "draft_decode": "the draft ran at least one decode step (num_steps >= 2)",
    "rejection": "verify rejected a draft token",
    "accept_all": "verify accepted every draft token of a round",
    "accept_some": "verify accepted some draft tokens of a round and rejected the next",
    "look_ahead_rejected": "a layer of a multi-layer draft had consumed a draft that verify rejected (boundary KV)",
    "look_ahead_past_prompt": "at the end of a non-final chunk, a layer's look-ahead went past the end of the prompt",
    "tree": "the draft proposed more than one token at a time (topk > 1)",
    "path_not_in_front": "the accepted path was not the first nodes of the tree in their order",
    "branch_changes_parent": "a node was expanded on another branch than its parent (the two views of DESIGN 3.4 differ there)",
    "branch_holes": "branches of a tree began inside a page, with copies of its rows (topk > 1, page_size > 1)",
    "batch": "two requests were in one decode batch",
    "batch_grows": "a request joined while another was decoding",
    "batch_shrinks": "a request finished while another went on decoding",
    "page_crossed_in_draft": "a round's draft slots lie on two pages",
    "prompt_ends_in_page": "a prompt ended inside a page (page_size > 1)",
    "retraction": "a request lost its slots, and was prefilled again",
    "retraction_in_decode": "a request that had been verified lost its slots, and was prefilled again",
    "chunk_ends_in_output": "a non-final chunk of a retracted request ended where its prompt had ended, or behind",
    "radix_hit": "a request reused rows that another had left in the radix cache",
    "radix_hit_in_page": "a reused prefix went on, the same, inside the page after it (page_size > 1)",
    "radix_hit_across_pages": "a reused prefix was longer than a page (page_size > 1)",
    "shared_chunk": "a prefill batch finished one prompt and began another",
    "one_token_tail": "the last of several chunks held one token",
    "early_stop": "a stop token, or the end of its grammar's text, ended a request before max_new_tokens",
    "sampled_verify": "a verify decided by coins",
    "coin_refuses": "of a draft token that the target would have drawn at times, a coin decided against it",
    "logits_changed": "a bias, a processor, a penalty or a grammar made another token the best, where verify committed one",
    "impossible": "a request asked for what cannot be: from some output token on no token is allowed, and nothing of it judged",
    "mixed_sampling": "requests that sample and greedy ones were in one decode batch",
    "abort_in_prefill": "a request was aborted between two chunks of its prompt",
    "abort_in_decode": "a request was aborted after it had been verified",
}


# What is drawn of a request is drawn in this order, and what is drawn of a whole case after it, in reverse. Features are taken
# away in this order: what a later one does may depend on an earlier one. A file that is not in this list comes after those
# that are, in the order of names.
_ORDER = """
model requests sampling stream min_p logit_bias logprobs penalties hidden_states min_new_tokens grammar events session
samples adapters cache prefill adaptive plain_decode draft_window tree sizes
""".split()  # noqa: SIM905


def _all() -> Iterator[Dimension]:
    names = [module.name for module in iter_modules(__path__) if module.name != "dimension"]
    for name in sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)):
        module = import_module(f"{__name__}.{name}")
        yield from module.DIMENSIONS if hasattr(module, "DIMENSIONS") else (module.DIMENSION,)


DIMENSIONS = {dimension.name: dimension for dimension in _all()}
HAPPENED = {name: happened for dimension in DIMENSIONS.values() for name, happened in dimension.happened.items()}
# Names that `Case.exercises` may use and the judge reports
FEATURES = {**GENERAL, **{name: sentence for name, (sentence, _) in HAPPENED.items()}}
