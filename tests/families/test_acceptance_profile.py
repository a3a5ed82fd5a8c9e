"""What each recipe promises: the hidden states that it feeds, accept lengths that all occur, and few ties."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.recipe import Recipe
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.reference.chain import draft_chain
from eagletwin.reference.draft_heads import Eagle3Head, FrozenHead, MtpHead, PlainDraft
from eagletwin.reference.eagle import EagleHead, Head, draft_rows
from eagletwin.reference.everywhere import chains_everywhere, layers_everywhere
from eagletwin.reference.layers import rms_norm
from eagletwin.reference.llama import TargetRows, causal, target_rows

from ..rows import long

# What each recipe promises: every accept length occurs often, and ties are rare. Measured with the reference alone.

PROMPTS, NEW_TOKENS = 24, 24
NUM_STEPS = (1, 3, 5)
# A recipe for each kind of draft, and experts and latent rows.
EACH_DRAFT = (
    "llama-gqa",
    "llama-eagle3",
    "llama-mtp",
    "llama-mtp-chain",
    "llama-standalone",
    "gemma-4-assistant",
    "deepseek-nextn",
)
TOGETHER = 6  # texts in one forward of the target: fewer take more calls, more have more pairs of rows of two texts


def texts(recipe: Recipe) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Seeded prompts of 1 to 40 tokens that the target goes on with: (length of the prompt, x[0..n-1], logits of all but the
    last). As many tokens more than NEW_TOKENS as the longest round that begins there has."""
    weights = model_pair(recipe.name).reference_target()
    generator = torch.Generator().manual_seed(5)
    count = PROMPTS if recipe.target.num_layers < 10 else PROMPTS // 4  # a target of 45 layers takes its time
    sizes, prompts = [], []
    for _ in range(count):
        sizes.append(int(torch.randint(1, 41, (1,), generator=generator)))
        prompts.append(torch.randint(0, recipe.target.vocab_size, (sizes[-1],), generator=generator))
    for begin in range(0, count, TOGETHER):
        tokens = prompts[begin : begin + TOGETHER]
        for _ in range(NEW_TOKENS + max(NUM_STEPS) + 1):
            lengths = [len(text) for text in tokens]
            logits = target_rows(weights, recipe.target, torch.cat(tokens), lengths).logits.split(lengths)
            tokens = [torch.cat([text, rows[-1:].argmax(-1)]) for text, rows in zip(tokens, logits, strict=True)]
        yield from zip(sizes[begin : begin + TOGETHER], tokens, logits, strict=True)


def drafts(recipe: Recipe, heads: Sequence[Head], tokens: Tensor, target: TargetRows) -> Tensor:
    """What the drafts behind x[0..M] are chosen from, as long as those before are the text's: [n-1, S, V], for M = 1..n-1."""
    if recipe.mtp_layers:
        blocks = layers_everywhere(heads, recipe.chained, tokens, target.hidden)
    else:
        head = heads[0]
        if isinstance(head, FrozenHead):
            head = replace(head, memory=(target.keys, target.values))
        blocks = chains_everywhere(head, tokens, target.hidden, max(NUM_STEPS))
    return torch.cat([logits for _, logits in blocks])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EACH_DRAFT, *long(*sorted(RECIPES.keys() - {*EACH_DRAFT}))])
def test_every_accept_length_occurs_as_often_as_the_recipe_says(name: str) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    weights, heads = pair.reference_target(), pair.reference_heads(recipe)
    lengths = {min(steps, recipe.mtp_layers or steps): Counter[int]() for steps in NUM_STEPS}
    choices = ties = 0
    for size, tokens, of_target in texts(recipe):
        of_drafts = drafts(recipe, heads, tokens, target_rows(weights, recipe.target, tokens[:-1]))
        drafted = of_drafts.argmax(-1)  # [n-1, S]
        for steps, counted in lengths.items():
            committed = size
            while committed < size + NEW_TOKENS:
                agree = drafted[committed - 1, :steps] == tokens[committed + 1 : committed + 1 + steps]
                accepted = int(agree.long().cumprod(0).sum())
                counted[accepted + 1] += 1
                round_of = (of_drafts[committed - 1, :steps], of_target[committed : committed + accepted + 1])
                for logits in torch.cat(round_of):
                    choices, ties = choices + 1, ties + bool(FLOAT32.best(logits.numpy(), 1)[1])
                committed += accepted + 1
    for steps, counted in lengths.items():
        for length in range(1, steps + 2):
            assert counted[length] >= recipe.min_share * counted.total(), (steps, length, dict(counted))
    assert ties <= 0.002 * choices, (ties, choices)


# Which hidden states a recipe feeds (DESIGN §2), by what they are and not by their names.

NEXTN = sorted(
    name
    for name in RECIPES
    if RECIPES[name].family in ("deepseek", "deepseek_dsa", "mimo", "nemotron_h", "qwen3_5", "qwen3_next")
)
FROZEN = sorted(name for name in RECIPES if RECIPES[name].frozen)
STREAMS = sorted(name for name in RECIPES if RECIPES[name].target.compressed is not None)  # tests/reference has them
EAGLE = sorted(
    name
    for name in RECIPES
    if RECIPES[name].algorithm == "EAGLE" and not RECIPES[name].mtp_layers and name not in NEXTN + FROZEN + STREAMS
)
MTP = sorted(name for name in RECIPES if RECIPES[name].mtp_layers)
EAGLE3 = sorted(name for name in RECIPES if RECIPES[name].algorithm == "EAGLE3")
PLAIN = sorted(name for name in RECIPES if RECIPES[name].algorithm == "STANDALONE")


def test_every_recipe_is_one_of_these() -> None:
    assert sorted(EAGLE + EAGLE3 + FROZEN + MTP + NEXTN + PLAIN + STREAMS) == sorted(RECIPES)


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_draft_consumes_no_state_and_is_a_llama_of_its_own(name: str) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    head, tokens = pair.reference_heads(recipe)[0], torch.arange(9)
    assert isinstance(head, PlainDraft)
    assert recipe.target_hidden == "none"
    own = target_rows(head.weights, recipe.draft, tokens)
    rows = draft_rows(head, tokens, torch.randn(9, 32), torch.arange(9), causal(9))
    assert torch.equal(rows.logits, own.logits)
    assert torch.equal(rows.keys, own.keys)
    assert rows.hidden.shape == (9, 0)
    for part in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):  # none of it is the target's
        assert not torch.equal(pair.draft[part], pair.target[part])


@pytest.mark.parametrize("name", [name for name in EAGLE + MTP + NEXTN if not RECIPES[name].target.pre_norm])
def test_the_target_feeds_its_state_after_the_final_norm(name: str) -> None:
    recipe, weights = RECIPES[name], model_pair(name).reference_target()
    rows = target_rows(weights, recipe.target, torch.arange(9))
    assert recipe.target_hidden == "post_norm"
    normed = rms_norm(rows.residual, weights["model.norm.weight"], recipe.target.rms_norm_eps)
    assert torch.equal(rows.hidden, normed)
    assert (rows.hidden - rows.residual).abs().max() > 0.1  # the two can be told apart
    assert torch.equal(rows.logits, rows.hidden @ weights["lm_head.weight"].T)


@pytest.mark.parametrize("name", ["mimo", "step-3.5"])
def test_the_target_feeds_its_state_before_the_final_norm(name: str) -> None:
    recipe, weights = RECIPES[name], model_pair(name).reference_target()
    rows = target_rows(weights, recipe.target, torch.arange(9))
    assert recipe.target_hidden == "pre_norm"
    assert torch.equal(rows.hidden, rows.residual)
    normed = rms_norm(rows.residual, weights["model.norm.weight"], recipe.target.rms_norm_eps)
    assert (rows.hidden - normed).abs().max() > 0.1  # the two can be told apart
    assert torch.equal(rows.logits, normed @ weights["lm_head.weight"].T)


@pytest.mark.parametrize("name", EAGLE3)
def test_the_target_of_eagle3_feeds_its_residual_stream_at_several_depths(name: str) -> None:
    recipe, weights = RECIPES[name], model_pair(name).reference_target()
    rows = target_rows(weights, recipe.target, torch.arange(9))
    assert recipe.target_hidden == "aux"
    states = rows.hidden.chunk(len(recipe.target.aux_layers), -1)  # [9, H] each
    assert len(states) in (2, 3)
    for one, other in itertools.pairwise((*states, rows.residual)):  # they can be told apart
        assert (one - other).abs().max() > 0.1
    normed = rms_norm(rows.residual, weights["model.norm.weight"], recipe.target.rms_norm_eps)
    assert torch.equal(rows.logits, normed @ weights["lm_head.weight"].T)  # and logits are made as ever


@pytest.mark.parametrize("name", EAGLE)
def test_the_draft_feeds_on_its_residual_sum_without_a_norm(name: str) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    head, tokens = pair.reference_heads(recipe)[0], torch.arange(9)
    assert isinstance(head, EagleHead)
    hidden = target_rows(pair.reference_target(), recipe.target, tokens).hidden
    rows = draft_rows(head, tokens[1:], hidden[:8], torch.arange(8), causal(8))
    assert torch.equal(rows.logits, rows.hidden @ head.lm_head.T)  # and sends the same state to the LM head
    chain = draft_chain(head, tokens, hidden, num_steps=2)
    assert (chain.hidden[0] - rows.hidden[-1]).abs().max() < 1e-11
    assert not any("norm.weight" in name and "layers." not in name for name in head.weights)  # there is no final norm


@pytest.mark.parametrize("name", NEXTN)
def test_an_mtp_layer_feeds_on_its_normed_state(name: str) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    head, tokens = pair.reference_heads(recipe)[0], torch.arange(9)
    assert isinstance(head, MtpHead)
    hidden = target_rows(pair.reference_target(), recipe.target, tokens).hidden
    rows = draft_rows(head, tokens[1:], hidden[:8], torch.arange(8), causal(8))
    assert torch.equal(rows.logits, rows.hidden @ head.lm_head.T)  # and sends the same state to the LM head
    before = draft_rows(replace(head, normed=False), tokens[1:], hidden[:8], torch.arange(8), causal(8)).hidden
    assert torch.equal(rows.hidden, rms_norm(before, head.weights["norm.weight"], recipe.draft.rms_norm_eps))
    assert (rows.hidden - before).abs().max() > 0.1  # the two can be told apart
    chain = draft_chain(head, tokens, hidden, num_steps=2)
    assert (chain.hidden[0] - rows.hidden[-1]).abs().max() < 1e-11


@pytest.mark.parametrize("name", MTP)
def test_each_layer_of_a_multi_layer_draft_is_a_head_of_its_own_and_hands_on_its_residual_sum(name: str) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    heads, tokens = pair.reference_heads(recipe), torch.arange(9)
    assert len(heads) == recipe.mtp_layers
    hidden = target_rows(pair.reference_target(), recipe.target, tokens).hidden
    found = []
    for head in heads:
        rows = draft_rows(head, tokens[1:], hidden[:8], torch.arange(8), causal(8))
        if isinstance(head, MtpHead):  # it has a final norm, and hands on the state before it
            normed = rms_norm(rows.hidden, head.weights["norm.weight"], recipe.draft.rms_norm_eps)
            assert (normed - rows.hidden).abs().max() > 0.1
            assert torch.equal(rows.logits, normed @ head.lm_head.T)
        else:
            assert isinstance(head, EagleHead)
            assert torch.equal(rows.logits, rows.hidden @ head.lm_head.T)
        found.append(rows.keys)
    for one, other in itertools.pairwise(found):  # they can be told apart
        assert (one - other).abs().amax((0, 2, 3)).min() > 0.01


@pytest.mark.parametrize("name", EAGLE3)
def test_the_draft_of_eagle3_feeds_on_its_residual_sum_before_its_final_norm_or_if_it_says_so_behind(name: str) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    head, tokens = pair.reference_heads(recipe)[0], torch.arange(9)
    assert isinstance(head, Eagle3Head)
    assert head.norm_output == ("norm_output" in recipe.head_norms)
    hidden = target_rows(pair.reference_target(), recipe.target, tokens).hidden
    rows = draft_rows(head, tokens[1:], head.feed(hidden[:8]), torch.arange(8), causal(8))
    before = draft_rows(replace(head, norm_output=False), tokens[1:], head.feed(hidden[:8]), torch.arange(8), causal(8)).hidden
    normed = rms_norm(before, head.weights["norm.weight"], recipe.draft.rms_norm_eps)
    assert (normed - before).abs().max() > 0.1
    assert torch.equal(rows.hidden, normed if head.norm_output else before)
    assert torch.equal(rows.logits[:, head.proposes], normed @ head.weights["lm_head.weight"].T)
    chain = draft_chain(head, tokens, hidden, num_steps=2)
    assert (chain.hidden[0] - rows.hidden[-1]).abs().max() < 1e-11


@pytest.mark.parametrize("name", [name for name in EAGLE3 if {"fc_norm", "norm_before_fc"} & {*RECIPES[name].head_norms}])
def test_norms_before_fc_are_of_the_targets_states_alone(name: str) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    head, eps = pair.reference_heads(recipe)[0], recipe.draft.rms_norm_eps
    assert isinstance(head, Eagle3Head)
    handed = target_rows(pair.reference_target(), recipe.target, torch.arange(9)).hidden
    if "fc_norm" in recipe.head_norms:
        each = handed.chunk(len(recipe.target.aux_layers), -1)
        normed = torch.cat([rms_norm(state, head.weights[f"fc_norm.{n}.weight"], eps) for n, state in enumerate(each)], -1)
    else:
        normed = rms_norm(handed, head.weights["input_norm.weight"], eps)
    assert torch.equal(head.feed(handed), normed @ head.weights["fc.weight"].T)
    assert (head.feed(handed) - handed @ head.weights["fc.weight"].T).abs().max() > 0.1  # they can be told apart


def test_a_reduced_vocabulary_is_mapped_by_offsets_that_go_up_and_down() -> None:
    pair, recipe = model_pair("llama-eagle3"), RECIPES["llama-eagle3"]
    d2t, proposes = pair.draft["d2t"], pair.proposes.tolist()
    assert [n + offset for n, offset in enumerate(d2t.tolist())] == proposes
    assert d2t.dtype == torch.int64
    assert d2t.min() < 0 < d2t.max()
    assert len(set(proposes)) == len(proposes) == recipe.draft_vocab_size
    assert proposes != sorted(proposes)
    assert set(proposes) < set(range(recipe.target.vocab_size))
    assert "d2t" not in model_pair("llama-eagle3-full").draft
    assert model_pair("llama-eagle3-full").proposes.tolist() == list(range(96))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_same_recipe_gives_the_same_weights(name: str) -> None:
    first = model_pair(name)
    model_pair.cache_clear()
    assert model_pair(name).digest == first.digest
    tensors = {**first.target, **{name: tensor for name, tensor in first.draft.items() if name != "d2t"}}
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values() if tensor.is_floating_point())
