"""The parts of `train`: the text, the heads in a form to train, the optimizer's rate, accept lengths."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import draft_chain
from eagletwin.reference.llama import target_rows
from eagletwin.reference.mtp import draft_extend

from .toy import TOY, library
from .train import text
from .train.heads import DraftPlan, draft_plans
from .train.measure import Reply, accept_lengths
from .train.optimise import optimise, share_of_rate
from .train.settings import BEGIN, END, SIZES, VOCABULARY, Course
from .train.text import drawn_windows, frequent_tokens, spread_windows
from .train.unroll import unroll


@pytest.mark.slow  # reads 12 MB
def test_the_text_is_whole_documents_of_bytes_and_one_in_twenty_is_held_out() -> None:
    for part in (library().training, library().held_out):
        assert part[0] == BEGIN
        assert part[-1] == END
        assert int(part.max()) == END
        assert torch.equal((part == BEGIN).nonzero()[1:], (part == END).nonzero()[:-1] + 1)
    counts = [int((part == BEGIN).sum()) for part in (library().training, library().held_out)]
    assert counts[1] == sum(counts) // text.HELD_OUT
    assert len(library().training) > 2_000_000


def test_a_python_without_sources_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_documents", lambda library: iter([b"a", b"b"] * text.HELD_OUT))
    with pytest.raises(HarnessError, match="has no sources"):
        text.standard_library()


def test_windows_are_parts_of_the_text() -> None:
    tokens = torch.arange(50, dtype=torch.int16)
    for windows in (drawn_windows(tokens, 9, 50, torch.Generator()), spread_windows(tokens, 4, 7)):
        assert torch.equal(windows, windows[:, :1] + torch.arange(windows.shape[1]))
    assert spread_windows(tokens, 4, 7)[:, 0].tolist() == [0, 10, 20, 30]


def test_the_most_frequent_tokens_are_in_ascending_order() -> None:
    assert frequent_tokens(torch.tensor([5, 1, 5, 3, 3, 5, 0], dtype=torch.int16), 3, 8).tolist() == [0, 3, 5]


def windows_of(name: str, count: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, RECIPES[name].target.vocab_size, (count, length), generator=generator)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-eagle3"])
def test_each_position_drafts_as_the_chain_of_the_reference(name: str) -> None:
    """The chain is given the tokens of the text in place of its own drafts."""
    recipe, pair = RECIPES[name], model_pair(name)
    head, steps, length = pair.reference_head(recipe), 3, 6
    windows = windows_of(name, 2, length + steps)
    hidden = torch.stack([target_rows(pair.reference_target(), recipe.target, tokens).hidden for tokens in windows])
    found = unroll(head, windows, hidden[:, :length], 0, steps)
    for window, tokens in enumerate(windows):
        for row in range(length):
            drafted = tokens[row + 2 : row + 2 + steps].tolist()
            chain = draft_chain(head, tokens[: row + 2], hidden[window], steps, [*drafted, 0])
            for step, rows in enumerate(found):
                torch.testing.assert_close(rows.logits[window * length + row], chain.logits[step])


def test_a_layer_of_a_multi_layer_draft_consumes_what_the_reference_says() -> None:
    recipe, pair = RECIPES["llama-mtp"], model_pair("llama-mtp")
    heads, length = pair.reference_heads(recipe), 6
    windows = windows_of("llama-mtp", 1, length + len(heads))
    hidden = target_rows(pair.reference_target(), recipe.target, windows[0]).hidden
    layers = draft_extend(heads, False, windows[0], hidden, range(length), [None] * len(heads))
    for layer, (head, expected) in enumerate(zip(heads, layers, strict=True)):
        [rows] = unroll(head, windows, hidden[None, :length], layer, 1)
        torch.testing.assert_close(rows.logits, expected.logits)
        torch.testing.assert_close(rows.keys, expected.keys)


@pytest.mark.parametrize(("name", "recipe"), [("eagle", "llama-tiny"), ("eagle3", "llama-eagle3"), ("mtp", "llama-mtp")])
def test_a_draft_has_the_tensors_that_its_family_has(name: str, recipe: str) -> None:
    model, tensors = RECIPES[recipe], model_pair(recipe).draft
    settings = replace(
        TOY,
        target=replace(model.target, aux_layers=(0, 1, 2)),
        draft=model.draft,
        intermediate_size=model.intermediate_size,
        mtp_layers=4,
    )
    plan = draft_plans(settings, torch.arange(64))[name]
    assert {key: tuple(tensor.shape) for key, tensor in plan.checkpoint(plan.initial(0)).items()} == {
        key: tuple(tensor.shape) for key, tensor in tensors.items()
    }


def test_the_heads_run_on_the_device_of_their_weights() -> None:
    """The device `meta` computes nothing, and refuses tensors of another as a GPU does."""
    from .train.distil import Pupil

    shape = TOY.target
    size, inner, kv = shape.hidden_size, TOY.intermediate_size, shape.num_kv_heads * shape.head_dim
    layer = {
        "input_layernorm": (size,),
        "post_attention_layernorm": (size,),
        **{f"self_attn.{one}_proj": (size, size) for one in "qo"},
        **{f"self_attn.{one}_proj": (kv, size) for one in "kv"},
        **{f"mlp.{one}_proj": (inner, size) for one in ("gate", "up")},
        "mlp.down_proj": (size, inner),
    }
    shapes = {f"model.layers.{n}.{name}.weight": sizes for n in range(shape.num_layers) for name, sizes in layer.items()}
    shapes |= {
        "model.embed_tokens.weight": (VOCABULARY, size),
        "lm_head.weight": (VOCABULARY, size),
        "model.norm.weight": (size,),
    }
    target = {name: torch.empty(sizes, device="meta") for name, sizes in shapes.items()}
    for plan in draft_plans(TOY, torch.arange(64)).values():
        weights = {name: tensor.to("meta") for name, tensor in plan.initial(0).items()}
        for number, head in enumerate(plan.heads(weights, target)):
            pupil = Pupil(head, plan, number, 2)
            lesson = pupil.lesson(target, torch.zeros(2, 12, dtype=torch.int64))
            assert pupil.loss(lesson).device.type == "meta"


def test_the_rate_rises_and_falls() -> None:
    rates = [share_of_rate(step, 100) for step in range(100)]
    assert rates.index(max(rates)) == 4
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0 < rates[-1] < 0.06


def test_the_optimizer_makes_the_loss_smaller_and_says_so() -> None:
    number, said = torch.tensor([3.0], requires_grad=True), list[tuple[int, float]]()
    course = Course(steps=100, windows=1, length=1, rate=0.1)
    optimise([number], course, lambda: number.square().sum(), lambda step, loss: said.append((step, loss)))
    assert [step for step, _ in said] == [20, 40, 60, 80, 100]
    assert said[-1][1] < 0.5


@pytest.mark.parametrize("name", ["llama-tiny", "llama-mtp"])
def test_accept_lengths_are_those_of_greedy_verification(name: str) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    weights, count, begin = pair.reference_target(), 24, 5
    tokens = windows_of(name, 1, begin)[0]
    for _ in range(count + 5):
        tokens = torch.cat([tokens, target_rows(weights, recipe.target, tokens).logits[-1:].argmax(-1)])
    settings = replace(TOY, new_tokens=count, num_steps=recipe.mtp_layers or 3)
    plan = DraftPlan(name, recipe, pair.proposes, {})
    draft = {name: tensor.double() for name, tensor in pair.draft.items()}
    found = accept_lengths(settings, plan, draft, weights, [Reply(begin, tokens)])

    hidden, heads, lengths, committed = (
        target_rows(weights, recipe.target, tokens).hidden,
        plan.heads(draft, weights),
        [],
        begin,
    )
    while committed < begin + count:
        known = tokens[: committed + 1]
        if recipe.mtp_layers:  # the layers see few rows of rejected drafts here, and all of them anew
            layers = draft_extend(heads, False, known, hidden, range(committed), [None] * len(heads))
            drafted = torch.stack([layer.logits[-1].argmax() for layer in layers])
        else:
            drafted = draft_chain(heads[0], known, hidden, settings.num_steps).drafted
        verified = target_rows(weights, recipe.target, torch.cat([known, drafted])).logits[committed:].argmax(-1)
        accepted = int((verified[:-1] == drafted).long().cumprod(0).sum())
        lengths.append(accepted + 1)
        committed += accepted + 1
    if not recipe.mtp_layers:
        assert found.rounds == len(lengths)
        assert found.accept_length == pytest.approx(sum(lengths) / len(lengths))
    assert found.accept_length == pytest.approx(sum(lengths) / len(lengths), abs=0.5)
    assert list(found.accepted) == sorted(found.accepted, reverse=True)


def test_the_sizes_are_what_the_command_says() -> None:
    """A vocabulary, heads and KV heads that two ranks can share, and states that the target has before its last layers."""
    for settings in SIZES.values():
        shape = settings.target
        assert shape.num_heads * shape.head_dim == shape.hidden_size
        assert shape.num_kv_heads % 2 == shape.vocab_size % 16 == 0
        assert max(shape.aux_layers) < shape.num_layers - 1
        assert settings.mtp_layers == settings.num_steps
        assert settings.prompt_size + settings.new_tokens <= settings.draft_course.length
