"""Gemma-4 and its assistant against transformers' own models, and what makes the assistant another kind of draft."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import draft_chain
from eagletwin.reference.draft_heads import FrozenHead
from eagletwin.reference.growth import draft_tree
from eagletwin.reference.llama import TargetRows, target_rows
from eagletwin.reference.rounds import committed_side_by_side, draft_rounds, grow_rounds

from .kept import near

NAMES = sorted(name for name in RECIPES if RECIPES[name].frozen)
COUNT = 24  # longer than the short window, shorter than the long one
# transformers works its rotary angles out in float32, and norms in it.
CLOSE = 2e-6


def tokens_of(name: str) -> Tensor:
    return torch.randint(0, RECIPES[name].target.vocab_size, (COUNT,), generator=torch.Generator().manual_seed(3))


def rows_of(name: str) -> TargetRows:
    return target_rows(model_pair(name).reference_target(), RECIPES[name].target, tokens_of(name)[:-1])


def head_of(name: str) -> FrozenHead:
    rows = rows_of(name)
    head = model_pair(name).reference_head(RECIPES[name])
    assert isinstance(head, FrozenHead)
    return replace(head, memory=(rows.keys, rows.values))


def models(name: str) -> tuple[Any, Any]:
    """Target and assistant, in float64, by the configurations of the recipe's checkpoint."""
    from transformers import (
        Gemma4AssistantConfig,
        Gemma4AssistantForCausalLM,
        Gemma4ForCausalLM,
        Gemma4TextConfig,
    )

    recipe, pair = RECIPES[name], model_pair(name)
    target, draft = family_of(recipe).checkpoint(recipe, pair.target, pair.draft)
    config = Gemma4TextConfig(**target.config, attn_implementation="eager")
    served = Gemma4ForCausalLM(config).double().eval()
    missing, unexpected = served.load_state_dict({key: part.double() for key, part in target.weights.items()}, strict=False)
    assert not unexpected, unexpected
    assert not [key for key in missing if "rotary" not in key], missing
    text = Gemma4TextConfig(**draft.config["text_config"], attn_implementation="eager")  # type: ignore[arg-type]
    own = {key: draft.config[key] for key in ("backbone_hidden_size", "tie_word_embeddings")}
    assistant = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, **own)).double().eval()
    missing, unexpected = assistant.load_state_dict({key: part.double() for key, part in draft.weights.items()}, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"model.embed_tokens.weight"}, missing
    return served, assistant


@pytest.mark.parametrize("name", NAMES)
def test_the_target_is_transformers_gemma_4(name: str) -> None:
    served, _ = models(name)
    ours = rows_of(name)
    with torch.no_grad():
        theirs = served(tokens_of(name)[None, :-1], output_hidden_states=True, use_cache=True)
    near(ours.logits, theirs.logits[0], CLOSE)
    near(ours.hidden, theirs.hidden_states[-1][0], CLOSE)
    for layer, window in enumerate(RECIPES[name].target.windows):
        if not window:
            near(ours.keys[layer], theirs.past_key_values.layers[layer].keys[0].transpose(0, 1), CLOSE)
            near(ours.values[layer], theirs.past_key_values.layers[layer].values[0].transpose(0, 1), CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_each_forward_is_transformers_assistant_on_the_targets_rows(name: str) -> None:
    """At the position of the last row, with the rows that a window of that row has: what an engine gives the model."""
    _, assistant = models(name)
    recipe, tokens, rows, head = RECIPES[name], tokens_of(name), rows_of(name), head_of(name)
    last = COUNT - 2
    shared = {}
    for read, window in zip(head.reads, recipe.draft.windows, strict=True):
        kept = slice(-window if window else None, None)
        kind = "sliding_attention" if window else "full_attention"
        shared[kind] = tuple(part[read, kept].transpose(0, 1)[None] for part in (rows.keys, rows.values))
    ours = draft_chain(head, tokens, rows.hidden, 3)
    consumed = [int(tokens[-1]), *ours.drafted[:-1].tolist()]
    state = rows.hidden[last]
    for step, token in enumerate(consumed):
        embedded = head.embedding[token] * head.embedding.shape[1] ** 0.5
        with torch.no_grad():
            out = assistant(
                inputs_embeds=torch.cat([embedded, state])[None, None],
                position_ids=torch.tensor([[last]]),
                shared_kv_states=shared,
            )
        near(ours.logits[step], out.logits[0, 0], CLOSE)
        state = out.last_hidden_state[0, 0]
        if step:
            near(ours.handed_on[step - 1], state, CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_many_rounds_at_once_are_those_drafted_one_at_a_time(name: str) -> None:
    tokens, rows, head = tokens_of(name), rows_of(name), head_of(name)
    committed = committed_side_by_side(head, [tokens], rows.hidden)
    topk, steps = 3, 3
    for at in (COUNT - 1, 5):
        prefix = replace(head, memory=(rows.keys[:, :at], rows.values[:, :at]))
        alone = draft_tree(prefix, tokens[: at + 1], rows.hidden, topk, steps)
        together = grow_rounds(head, committed, [COUNT - 1], [(0, at)], topk, steps, "true_tree")
        torch.testing.assert_close(together.logits[0], alone.logits)
        torch.testing.assert_close(together.handed_on[0], alone.handed_on)
        followed = draft_rounds(
            head, committed, [COUNT - 1], [(0, at)], alone.tokens[None], alone.expanded[None], "slot_layout"
        )
        torch.testing.assert_close(followed.logits[0], alone.logits)  # no row sees another of its round
        chain = draft_chain(prefix, tokens[: at + 1], rows.hidden, steps)
        torch.testing.assert_close(chain.logits[0], alone.logits[0])


def test_a_head_without_the_targets_rows_says_so() -> None:
    head = replace(head_of(NAMES[0]), memory=None)
    with pytest.raises(ValueError, match="without them"):
        draft_chain(head, tokens_of(NAMES[0]), rows_of(NAMES[0]).hidden, 2)
