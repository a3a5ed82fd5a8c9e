"""Texts are followed in float32 and in 16 bits: which drafts a pair makes, and how wide the band of a type is."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.deserved.checkpoint import Checkpoint
from eagletwin.harness.deserved.draft import DraftModel, Shared, read_draft
from eagletwin.harness.deserved.follow import (
    EITHER,
    NO,
    YES,
    Followed,
    Shape,
    agreement,
    chain_logits,
    follow_chains,
    follow_last_fed,
    follow_trees,
)
from eagletwin.harness.deserved.precision import Pair, Rounding, load_served
from eagletwin.harness.deserved.rounds import walk
from eagletwin.harness.deserved.statistics import MOST_DEVIATIONS, Expected, chances, expected_rounds
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.store import checkpoints
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import draft_chain
from eagletwin.reference.draft_heads import DraftRows, behind
from eagletwin.reference.growth import View, draft_tree, select
from eagletwin.reference.llama import target_rows
from eagletwin.reference.mtp import draft_extend, draft_extends
from eagletwin.reference.tree import tree_parents

from ..lab.train.pair import draft_of_recipe
from .fake_server import STARTED

# Which drafts are accepted along a text, and how many rounds that makes.


TIE = 2e-4
# A checkpoint of MiMo-7B's layer, with latent attention, of a layer behind one that keeps a state, or of a draft without rows
# of its own is not read: `acceptance` refuses it
SINGLE = sorted(
    name
    for name, recipe in RECIPES.items()
    if name != "mimo"
    and recipe.target.compressed is None
    and not recipe.mtp_layers
    and recipe.target.latent is None
    and not recipe.target.states
    and not recipe.frozen
)


def draft_of(name: str) -> DraftModel:
    pair = model_pair(name)
    if not RECIPES[name].reads_states:  # no checkpoint of a head
        return draft_of_recipe(RECIPES[name], pair.reference_heads(RECIPES[name]))
    lent = (pair.target["model.embed_tokens.weight"].double(), pair.target["lm_head.weight"].double())
    return read_draft(Checkpoint(checkpoints(name)[1]), Shared(*lent, RECIPES[name].target.num_layers))


def greedy(name: str, length: int, seed: int) -> tuple[list[int], torch.Tensor]:
    """A text whose last tokens are the target's own, and the states that the draft consumes."""
    recipe, weights = RECIPES[name], model_pair(name).reference_target()
    tokens = torch.randint(0, recipe.target.vocab_size, (5,), generator=torch.Generator().manual_seed(seed))
    while len(tokens) < length:
        tokens = torch.cat([tokens, target_rows(weights, recipe.target, tokens).logits[-1:].argmax(-1)])
    return tokens.tolist(), target_rows(weights, recipe.target, tokens).hidden


@pytest.mark.parametrize("name", ["llama-tiny", "llama-eagle3", "llama-mtp"])
def test_a_draft_is_read_where_new_tensors_go_elsewhere(name: str) -> None:
    """As with --device cuda, where what the reference makes anew lands on the GPU unless it says otherwise."""
    lent = (model_pair(name).target["model.embed_tokens.weight"].double(), model_pair(name).target["lm_head.weight"].double())
    with torch.device("meta"):
        draft = read_draft(Checkpoint(checkpoints(name)[1]), Shared(*lent, RECIPES[name].target.num_layers))
    assert {tensor.device.type for head in draft.heads for tensor in head.weights.values()} == {"cpu"}


@pytest.mark.parametrize("name", SINGLE)
def test_a_chain_is_accepted_as_far_as_the_drafts_are_the_text(name: str) -> None:
    tokens, hidden = greedy(name, 24, seed=1)
    followed, head = follow_chains(draft_of(name), tokens, hidden, 3, TIE), model_pair(name).reference_heads(RECIPES[name])[0]
    for committed in range(1, len(tokens) - 1):
        drafted = draft_chain(head, torch.tensor(tokens[: committed + 1]), hidden, 3).drafted.tolist()
        after, accepted = tokens[committed + 1 :], 0
        while accepted < min(3, len(after)) and drafted[accepted] == after[accepted]:
            accepted += 1
        assert followed.accepted(committed) == accepted
        assert accepted in followed.possible(committed)


def test_a_head_of_several_layers_by_other_names_is_refused(tmp_path: Path) -> None:
    """SGLang serves it: it leaves the norm that it does not find at ones, and says nothing."""
    target, _ = checkpoints("qwen3-eagle3-deep")
    draft = Checkpoint(checkpoints("qwen3-eagle3-deep")[1])
    (tmp_path / "config.json").write_text((draft.folder / "config.json").read_text())
    named = {name.replace("layers.1.hidden_norm", "layers.1.input_layernorm"): it for name, it in draft.tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    lent = Checkpoint(target).tensors
    shared = Shared(lent["model.embed_tokens.weight"], lent["lm_head.weight"], 4)
    with pytest.raises(InputError, match=r"no tensor layers\.1\.hidden_norm\.weight"):
        read_draft(Checkpoint(tmp_path), shared)


@pytest.mark.parametrize("view", ["true_tree", "slot_layout"])
@pytest.mark.parametrize(("topk", "num_steps", "nodes"), [(2, 3, 7), (4, 4, 8), (3, 1, 3)])
@pytest.mark.parametrize("name", ["llama-tiny", "llama-eagle3", "llama-standalone"])
def test_a_tree_is_accepted_as_far_as_the_text_lies_in_it(name: str, topk: int, num_steps: int, nodes: int, view: View) -> None:
    tokens, hidden = greedy(name, 20, seed=2)
    head = model_pair(name).reference_heads(RECIPES[name])[0]
    followed = follow_trees(draft_of(name), tokens, hidden, Shape(num_steps, topk, nodes), TIE, view)
    lengths = set()
    for committed in range(1, len(tokens) - 1):
        growth = draft_tree(head, torch.tensor(tokens[: committed + 1]), hidden, topk, num_steps, view)
        selected, drafted = select(growth.logits, growth.expanded, topk, nodes - 1)
        parents, node, accepted = tree_parents(selected, topk, growth.expanded.flatten().tolist()), 0, 0
        for token in tokens[committed + 1 :]:
            children = [n for n, parent in enumerate(parents) if parent == node and drafted[n - 1] == token and n]
            if not children:
                break
            node, accepted = children[0], accepted + 1
        assert followed.accepted(committed) == accepted
        assert accepted in followed.possible(committed)
        lengths.add(accepted)
    assert len(lengths) > 1


@pytest.mark.parametrize("name", ["llama-mtp", "llama-mtp-chain"])
def test_layers_are_followed_as_each_extend_by_itself(name: str) -> None:
    tokens, hidden = greedy(name, 24, seed=3)
    heads, chained = model_pair(name).reference_heads(RECIPES[name]), RECIPES[name].chained
    followed = follow_chains(draft_of(name), tokens, hidden, 4, TIE)
    for committed in range(1, len(tokens) - 1):
        layers = draft_extend(heads, chained, torch.tensor(tokens[: committed + 1]), hidden, range(committed), [None] * 4)
        drafted = [int(rows.logits[-1].argmax()) for rows in layers]
        after, accepted = tokens[committed + 1 :], 0
        while accepted < min(4, len(after)) and drafted[accepted] == after[accepted]:
            accepted += 1
        assert followed.accepted(committed) == accepted


def one_round_after_the_other(
    draft: DraftModel, tokens: list[int], hidden: torch.Tensor, starts: list[int] | None, cuts: tuple[int, ...]
) -> Followed:
    """follow_last_fed of a text whose x[7] was emitted first, by what each chunk's and each round's draft extend writes."""
    ids, count, layers = torch.tensor(tokens), len(tokens), len(draft.heads)
    found = Followed(*(np.full((count, layers), NO) for _ in range(2)))
    stored: list[DraftRows | None] = [None] * layers
    end, committed = 0, 7
    for cut in cuts:  # the prompt, x[0..6], is known
        rows = draft_extend(draft.heads, draft.chained, ids[:7], hidden, range(end, cut), stored)
        stored, end = [behind(old, new) for old, new in zip(stored, rows, strict=True)], cut
    while committed < count - 1:
        rows = draft_extend(draft.heads, draft.chained, ids[: committed + 1], hidden, range(end, committed), stored)
        stored, end = [behind(old, new) for old, new in zip(stored, rows, strict=True)], committed
        for step in range(min(layers, count - 1 - committed)):
            said = agreement(rows[step].logits[-1:], ids[committed + step + 1 : committed + step + 2], TIE)
            found.agrees[committed, step], found.chosen[committed, step] = said[0][0], said[1][0]
        committed += found.accepted(committed) + 1
        if starts is not None:
            committed = next((start for start in starts if start > end), count)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama-mtp-chain", "llama-mtp"])
def test_rounds_are_followed_as_if_one_after_the_other(name: str) -> None:
    """Through a text of 300 tokens that has some of the drafts, through rounds that an engine would not have made, and behind
    prompts that were read in chunks."""
    draft, random = draft_of(name), torch.Generator().manual_seed(0)
    hidden = torch.randn(300, draft.heads[0].embedding.shape[1], dtype=torch.float64, generator=random)
    tokens = torch.randint(draft.heads[0].embedding.shape[0], (300,), generator=random).tolist()
    each = torch.arange(1, 300)
    for _ in range(4):  # each time, a third of the tokens becomes what a layer proposes there
        layers = draft_extends(
            draft.heads, draft.chained, torch.tensor(tokens), hidden, range(299), each, each, [None] * draft.layers
        )
        for layer, rows in enumerate(layers):
            drafted, chance = rows.logits.argmax(-1).tolist(), torch.rand(300, generator=random).tolist()
            for place in range(layer + 2, 300):
                tokens[place] = drafted[place - layer - 2] if chance[place] < 1 / 3 else tokens[place]
    odd = [start for start in range(7, 299) if start == 7 or chance[start] < 0.4]
    accepted, behind_cuts = set(), {}
    for starts, cuts in product((None, odd), ((), (6,), (5,), (2, 4), (3, 4, 5, 6))):
        found = follow_last_fed(draft, tokens, hidden, 7, draft.layers, TIE, starts, cuts)
        expected = one_round_after_the_other(draft, tokens, hidden, starts, cuts)
        behind_cuts[starts is None, cuts] = found.agrees.tobytes()
        assert (found.agrees == expected.agrees).all()
        assert (found.chosen == expected.chosen).all()
        accepted |= {found.accepted(committed) for committed in range(7, 299)}
    assert {0, 1, 2} <= accepted
    assert behind_cuts[False, ()] != behind_cuts[False, (6,)]  # what a chunk looks ahead at decides what is accepted


def test_where_every_draft_is_right_no_row_keeps_a_wrong_one() -> None:
    """Then the layout and what is right are one, round by round."""
    name = "llama-mtp"
    tokens, hidden = greedy(name, 30, seed=4)
    draft = draft_of(name)
    right, layout = follow_chains(draft, tokens, hidden, 2, TIE), follow_last_fed(draft, tokens, hidden, 5, 2, TIE, None)
    committed = 5
    while right.accepted(committed) == 2 and committed < len(tokens) - 3:
        assert layout.accepted(committed) == 2
        committed += 3
    assert layout.accepted(committed) == right.accepted(committed)


def test_a_close_choice_may_go_either_way_and_no_other() -> None:
    logits = torch.tensor([[1.0, 0.9999, 0.0], [1.0, 0.5, 0.0], [1.0, 0.5, 0.0], [0.5, 0.49995, 1.0], [1.0, -torch.inf, 0.0]])
    agrees, chosen = agreement(logits, torch.tensor([1, 0, 1, 0, 1]), tie=2e-4)
    assert agrees.tolist() == [EITHER, YES, NO, NO, NO]
    assert chosen.tolist() == [NO, YES, NO, NO, NO]


def followed(*rows: str) -> Followed:
    """Rows M = 0.. of what is accepted, a letter a depth: y, n, e."""
    agrees = np.array([["nye".index(letter) for letter in row] for row in rows])
    return Followed(agrees, np.where(agrees == EITHER, NO, agrees))


def test_a_text_decides_its_rounds() -> None:
    """x[1] was emitted first: from 1 two are accepted, from 4 none, from 5 one and the text is over."""
    found = walk(followed("nn", "yy", "nn", "nn", "ny", "yn", "nn", "nn"), 1)
    assert (found.starts, found.accepted, found.fewest, found.most) == ((1, 4, 5), (2, 0, 1), 3, 3)


def test_near_ties_make_a_band() -> None:
    """From 1 none, one or two may be accepted; from 2 and 3 none."""
    found = walk(followed("nn", "ee", "nn", "nn", "nn", "nn"), 1)
    assert (found.fewest, found.most) == (2, 4)
    assert found.rounds == 4  # as the reference chooses: none


def test_a_text_of_one_token_needs_no_round() -> None:
    found = walk(followed("nn", "nn"), 1)
    assert (found.rounds, found.fewest, found.most) == (0, 0, 0)


# The expectation of rejection sampling: against rounds that are drawn, and against an enumeration of all of them.


def drawn(kept: Array, begin: int, random: np.random.Generator) -> int:
    """Rounds of one walk."""
    committed, rounds, last = begin, 0, len(kept) - 1
    while committed < last:
        drafts = 0
        while drafts < kept.shape[1] and random.random() < kept[committed, drafts]:
            drafts += 1
        committed, rounds = committed + drafts + 1, rounds + 1
    return rounds


def some_chances(size: int, steps: int, seed: int) -> Array:
    kept = np.random.default_rng(seed).random((size, steps))
    for place in range(size):
        kept[place, max(0, size - 1 - place) :] = 0  # the text has ended
    return kept


def test_mean_and_variance_are_those_of_rounds_that_are_drawn() -> None:
    kept, random = some_chances(60, 3, 1), np.random.default_rng(2)
    rounds = np.array([drawn(kept, 7, random) for _ in range(4000)])
    found = expected_rounds(kept, 7)
    assert abs(rounds.mean() - found.rounds) < 4 * (found.variance / len(rounds)) ** 0.5
    # the variance of a sample varies by sqrt(2 / n) of itself
    assert abs(rounds.var() / found.variance - 1) < 5 * (2 / len(rounds)) ** 0.5


def test_they_are_what_all_ways_to_accept_come_to() -> None:
    """A text of five tokens behind its prompt, two drafts a round: each way to accept, with its chance."""
    kept = some_chances(6, 2, 3)
    ways = dict[int, float]()

    def go(committed: int, rounds: int, chance: float) -> None:
        if committed >= 5:
            ways[rounds] = ways.get(rounds, 0.0) + chance
            return
        for accepts in {tuple(way) for way in product((True, False), repeat=2)}:
            drafts = 2 if all(accepts) else accepts.index(False)
            own = np.prod([p if yes else 1 - p for yes, p in zip(accepts, kept[committed], strict=True)])
            if own:
                go(committed + drafts + 1, rounds + 1, chance * float(own))

    go(0, 0, 1.0)
    mean = sum(rounds * chance for rounds, chance in ways.items())
    found = expected_rounds(kept, 0)
    assert sum(ways.values()) == pytest.approx(1)
    assert found.rounds == pytest.approx(mean)
    assert found.variance == pytest.approx(sum(chance * (rounds - mean) ** 2 for rounds, chance in ways.items()))


def test_what_cannot_be_otherwise_has_no_variance() -> None:
    all_kept, none = np.ones((10, 3)), np.zeros((10, 3))
    for place in range(10):
        all_kept[place, 9 - place :] = 0
    assert expected_rounds(all_kept, 1) == Expected(2.0, 0.0)
    assert expected_rounds(none, 1) == Expected(8.0, 0.0)
    assert expected_rounds(none, 1).deviations(8) == 0
    assert abs(expected_rounds(none, 1).deviations(9)) > 1000
    assert Expected(3, 1) + Expected(4, 2) == Expected(7, 3)


def test_the_smallest_loss_is_missed_in_one_of_twenty_runs() -> None:
    """Rounds of many texts are spread as a normal distribution; a server that is off so far is called wrong above the bound."""
    whole = sum((expected_rounds(some_chances(60, 3, seed), 7) for seed in range(30)), Expected(0, 0))
    rounds = whole.rounds + whole.smallest_loss + np.random.default_rng(5).normal(0, whole.variance**0.5, 20_000)
    shown = np.mean([whole.deviations(one) > MOST_DEVIATIONS for one in rounds])
    assert 0.94 < shown < 0.96


class Draft:
    """As DraftModel, of a recipe's head."""

    algorithm = "EAGLE"

    def __init__(self, model: str) -> None:
        self.heads = (model_pair(model).reference_heads(RECIPES[model])[0],)


@pytest.mark.parametrize("model", ["llama-tiny", "llama-eagle3"])
def test_a_draft_is_kept_by_what_the_chain_at_its_place_proposes(model: str) -> None:
    """Against a chain that is drafted behind one prefix by itself, fed with the text."""
    recipe, pair = RECIPES[model], model_pair(model)
    tokens = torch.randint(0, recipe.target.vocab_size, (24,), generator=torch.Generator().manual_seed(5))
    rows = target_rows(pair.reference_target(), recipe.target, tokens)
    said = (rows.logits[:-1] / 0.7).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    kept = chances(Draft(model), tokens.tolist(), rows.hidden, said, 3, 0.7)  # type: ignore[arg-type]
    head = pair.reference_heads(recipe)[0]
    for committed in (5, 11, 20):
        logits = draft_chain(head, tokens[: committed + 1], rows.hidden, 1).logits[0]
        own = float((logits / 0.7).log_softmax(-1)[tokens[committed + 1]] - said[committed])
        assert kept[committed, 0] == pytest.approx(min(1.0, float(np.exp(own))))
    assert (kept[-1] == 0).all()
    assert kept[-2, 1:].tolist() == [0, 0]
    assert ((kept >= 0) & (kept <= 1)).all()
    assert 0 < kept[1:-1, 0].mean() < 1


# The band of a type of 16 bits is measured: it is as wide as that type rounds, and holds what such rounding does.


STEPS, LENGTH = 3, 60


def served(model: str, dtype: str) -> Pair:
    target, draft = map(str, checkpoints(model))
    return load_served(target, draft, replace(STARTED, dtype=dtype), "cpu")


def band(pair: Pair, tokens: list[int]) -> float:
    assert pair.precision is not None
    return pair.precision.tie(tokens, pair.read(tokens).hidden, STEPS)


def text(seed: int) -> list[int]:
    drawn: list[int] = torch.randint(0, 90, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


@pytest.mark.slow  # transformers is imported
@pytest.mark.parametrize("model", ["llama-gqa", "llama-eagle3", "llama-mtp"])
def test_a_band_is_as_wide_as_its_type_rounds(model: str) -> None:
    longer, shorter = (served(model, dtype) for dtype in ("float16", "bfloat16"))
    for seed in range(3):
        # 11 and 8 significant bits; the largest of some hundred errors is one of a sample
        assert 4 < band(shorter, text(seed)) / band(longer, text(seed)) < 16


@pytest.mark.slow  # transformers is imported
def test_a_draft_of_several_layers_is_refused_in_16_bits() -> None:
    with pytest.raises(InputError, match="several layers"):
        served("llama-mtp", "bfloat16").must_draft(Shape(STEPS))
    served("llama-mtp", "float32").must_draft(Shape(STEPS))


@pytest.mark.slow  # transformers is imported
def test_float32_needs_no_measuring() -> None:
    assert served("llama-gqa", "float32").precision is None


@pytest.mark.slow  # transformers is imported
def test_what_other_roundings_do_lies_in_the_band() -> None:
    """The engine's roundings are not ours: here, those of the head behind other neighbours of the exact states."""
    pair = served("llama-gqa", "bfloat16")
    assert pair.precision is not None
    for seed in range(5):
        tokens = text(seed)
        ids, width = torch.tensor(tokens), band(pair, tokens)
        exact_states = pair.read(tokens).hidden.double()
        exact = [logits for _, logits in chain_logits(pair.draft, ids, exact_states, STEPS)]
        other_states = (exact_states * 1.001).to(torch.bfloat16).double()
        with Rounding(torch.bfloat16):
            other = [logits for _, logits in chain_logits(pair.draft, ids, other_states, STEPS)]
        for one, two in zip(exact, other, strict=True):
            size = one.abs().amax(-1)
            best = one.topk(2).indices
            off = (two - one).gather(-1, best)
            assert (off[..., 0] - off[..., 1]).abs().div(size).max() < width
