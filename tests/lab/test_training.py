"""A pair is trained in seconds on a short text, measured, written and found again."""

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagletwin.harness.cli.main import run_command
from eagletwin.harness.core.errors import HarnessError, InputError
from eagletwin.harness.deserved.checkpoint import checkpoint, read_prompts
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import draft_chain
from eagletwin.reference.draft_heads import proposed_tokens
from eagletwin.reference.llama import target_rows
from eagletwin.reference.mtp import draft_extend

from ..harness.doors import opened, program
from .__main__ import run
from .train import pair as cached
from .train import text
from .train.pair import FACTS, PARTS, PROMPTS, Reply, accept_lengths, cached_pair, is_whole, make_pair, new_pair
from .train.settings import BEGIN, END, SIZES, VOCABULARY, Course, PairSettings, draft_of, shape
from .train.text import Corpus, drawn_windows, frequent_tokens, spread_windows, standard_library
from .train.training import DraftPlan, draft_plans, optimise, share_of_rate, unroll

# A pair so small that it is trained in seconds, and a short text to train it on.

TARGET = shape(32, 4, 2, 1, (0, 1, 2))
TOY = PairSettings(
    name="toy",
    target=TARGET,
    draft=draft_of(TARGET),
    intermediate_size=48,
    target_course=Course(steps=60, windows=8, length=32, rate=1e-2),
    draft_course=Course(steps=25, windows=2, length=24, rate=5e-3),
    draft_vocab_size=64,
    prompts=2,
    prompt_size=8,
    new_tokens=6,
)


@cache
def library() -> Corpus:
    """Python's library, read once."""
    return standard_library()


def short_text() -> Corpus:
    """The begin of the library."""
    whole = library()
    return Corpus(whole.training[:100_000], whole.held_out[:10_000], "short")


# `train`: the text, heads, the rate and accept lengths, and the four checkpoints that it leaves.

# The parts of `train`: the text, the heads in a form to train, the optimizer's rate, accept lengths.


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
    head, steps, length = pair.reference_heads(recipe)[0], 3, 6
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
    from .train.training import Pupil

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


# `train` as its users see it: four checkpoints that load, made once, whole or not at all.


CHECKPOINT = {"config.json", "generation_config.json", "model.safetensors"}


def ignore(line: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy pair, trained once."""
    folder = tmp_path_factory.mktemp("pair")
    make_pair(TOY, short_text(), "cpu", folder, ignore)
    return folder


@pytest.mark.long
class TestTrained:
    """What is in the folder of a trained pair."""

    def test_it_has_every_file_and_says_so(self, pair: Path) -> None:
        assert {file.name for file in pair.iterdir()} == {*PARTS, PROMPTS, FACTS}
        assert all({file.name for file in (pair / part).iterdir()} == CHECKPOINT for part in PARTS)
        assert is_whole(pair)

    def test_its_prompts_are_held_out_text_that_meets_each_condition_of_a_server(self, pair: Path) -> None:
        found = [one.ids for one in read_prompts(pair / PROMPTS, checkpoint(str(pair / "target")))]
        text = short_text().held_out.tolist()
        assert all(one[0] == BEGIN for one in found)
        assert all(any(text[at : at + 3] == list(one[-3:]) for at in range(len(text))) for one in found)
        for chunk in (8, 64):
            longer = [one for one in found if len(one) > chunk]
            assert min(len(longer), len(found) - len(longer)) >= 15  # few losses among them tell the condition
        alike = [(one, other) for one, other in combinations(found, 2) if one != other and one[:20] == other[:20]]
        assert len(alike) == 5

    def test_training_makes_every_loss_smaller(self, pair: Path) -> None:
        losses = json.loads((pair / FACTS).read_text())["held_out_loss"]
        steps = [losses["target"], *losses["eagle"], *losses["eagle3"], *losses["mtp"]]
        assert len(steps) == 1 + 2 * TOY.self_fed + TOY.mtp_layers
        assert all(step["held_out"] < step["before"] - 0.5 for step in steps), losses

    def test_accept_lengths_are_stored_of_each_draft(self, pair: Path) -> None:
        facts = json.loads((pair / FACTS).read_text())["accept_lengths"]
        assert list(facts) == ["eagle", "eagle3", "mtp"]
        for found in facts.values():
            assert len(found["accepted"]) == TOY.num_steps
            assert found["accept_length"] == 1 + sum(found["accepted"])

    def test_transformers_loads_the_target_and_the_reference_has_the_same_numbers(self, pair: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float64)
        assert model.generation_config.eos_token_id == END
        weights = {name: tensor.double() for name, tensor in load_file(pair / "target/model.safetensors").items()}
        tokens = torch.arange(40, 80)
        with torch.no_grad():
            theirs = model.double()(tokens[None], output_hidden_states=True)
        ours = target_rows(weights, replace(TOY.target, aux_layers=()), tokens)
        # transformers works out its rotary angles in float32 whatever the dtype
        assert (ours.logits - theirs.logits[0]).abs().max() <= 1e-6 * theirs.logits.abs().max()
        assert (ours.hidden - theirs.hidden_states[-1][0]).abs().max() <= 1e-6 * ours.hidden.abs().max()

    def test_the_families_make_heads_of_the_drafts(self, pair: Path) -> None:
        target = load_file(pair / "target/model.safetensors")
        for name, plan in draft_plans(TOY, torch.arange(TOY.draft_vocab_size)).items():
            draft = load_file(pair / name / "model.safetensors")
            assert draft.keys() == plan.checkpoint(plan.initial(0)).keys()
            heads = plan.heads({key: tensor for key, tensor in draft.items() if key != "d2t"}, target)
            assert len(heads) == (TOY.mtp_layers if name == "mtp" else 1)
        proposed = proposed_tokens(load_file(pair / "eagle3/model.safetensors")["d2t"])
        assert torch.equal(proposed, proposed.unique())
        assert int(proposed.max()) < 256

    def test_configurations_name_the_classes_that_serve_them(self, pair: Path) -> None:
        configs = {part: json.loads((pair / part / "config.json").read_text()) for part in PARTS}
        assert {part: config["architectures"] for part, config in configs.items()} == {
            "target": ["LlamaForCausalLM"],
            "eagle": ["LlamaForCausalLMEagle"],
            "eagle3": ["LlamaForCausalLMEagle3"],
            "mtp": ["LlamaForCausalLMMTP"],
        }
        assert configs["eagle3"]["draft_vocab_size"] == TOY.draft_vocab_size
        assert configs["eagle3"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(TOY.target.aux_layers)
        assert {(config["bos_token_id"], config["eos_token_id"]) for config in configs.values()} == {(256, 257)}

    def test_the_same_settings_give_the_same_files(self, pair: Path, tmp_path: Path) -> None:
        make_pair(TOY, short_text(), "cpu", tmp_path, ignore)
        first, second = (json.loads((folder / FACTS).read_text()) for folder in (pair, tmp_path))
        assert first["files"] == second["files"]
        assert first["accept_lengths"] == second["accept_lengths"]


# Where a pair lies and when it is trained does not depend on what training does.


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sizes for which a pair was made, with files in place of training; the cache is empty."""
    asked = list[str]()

    def files(settings: object, corpus: Corpus, device: str, folder: Path, say: Callable[[str], None]) -> None:  # noqa: ARG001
        asked.append(device)
        digests = {}
        for part in PARTS:
            (folder / part).mkdir()
            (folder / part / "config.json").write_bytes(b"{}")
            digests[f"{part}/config.json"] = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
        (folder / PROMPTS).write_bytes(b"{}")
        digests[PROMPTS] = digests["mtp/config.json"]
        (folder / FACTS).write_text(json.dumps({"files": digests}))

    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cached, "make_pair", files)
    monkeypatch.setattr(cached, "standard_library", lambda: Corpus(torch.zeros(1), torch.zeros(1), "none"))
    return asked


def test_a_pair_is_made_once_and_its_checkpoints_are_printed(made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train"]) == 0
    first = capsys.readouterr().out
    assert run(["train"]) == 0
    assert capsys.readouterr().out == first
    assert made == ["cpu"]
    assert [line.split()[0] for line in first.splitlines()] == [*PARTS, "prompts"]
    *folders, prompts = (Path(line.split()[1]) for line in first.splitlines())
    assert all(folder.is_dir() for folder in folders)
    assert prompts.is_file()
    assert run(["train", "--seed", "1"]) == 0
    assert run(["train", "--size", "small"]) == 0
    assert len(made) == 3


@pytest.mark.parametrize("damage", ["a file is gone", "a file is another", "the facts are gone"])
def test_a_damaged_pair_is_made_again(made: list[str], damage: str) -> None:
    folder = cached_pair(TOY, "cpu", ignore)
    if damage == "a file is gone":
        (folder / "mtp/config.json").unlink()
    elif damage == "a file is another":
        (folder / "mtp/config.json").write_bytes(b"[]")
    else:
        (folder / FACTS).unlink()
    assert not is_whole(folder)
    assert cached_pair(TOY, "cpu", ignore) == folder
    assert is_whole(folder)
    assert len(made) == 2


@pytest.mark.parametrize("where", ["the cache", "a folder"])
def test_what_is_interrupted_leaves_nothing(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    whole = cached.make_pair

    def interrupted(settings: PairSettings, corpus: Corpus, device: str, folder: Path, say: Callable[[str], None]) -> None:
        whole(settings, corpus, device, folder, say)
        raise KeyboardInterrupt

    monkeypatch.setattr(cached, "make_pair", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached_pair(TOY, "cpu", ignore) if where == "the cache" else new_pair(TOY, "cpu", tmp_path / "pair", ignore)
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and not file.name.endswith(".lock")]
    monkeypatch.setattr(cached, "make_pair", whole)
    assert is_whole(
        cached_pair(TOY, "cpu", ignore) if where == "the cache" else new_pair(TOY, "cpu", tmp_path / "pair", ignore)
    )
    assert len(made) == 2


def test_who_asks_while_a_pair_is_made_waits_for_it(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes: a lock is of an open file."""
    whole, begun, waits = cached.make_pair, threading.Event(), threading.Event()

    def slowly(settings: PairSettings, corpus: Corpus, device: str, folder: Path, say: Callable[[str], None]) -> None:
        begun.set()
        assert waits.wait(60)
        whole(settings, corpus, device, folder, say)

    monkeypatch.setattr(cached, "make_pair", slowly)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(cached_pair, TOY, "cpu", ignore)
        assert begun.wait(60)
        second = pool.submit(cached_pair, TOY, "cpu", lambda line: waits.set())
        assert first.result() == second.result()
    assert is_whole(first.result())
    assert len(made) == 1


def test_what_a_killed_process_left_is_taken_away(made: list[str], tmp_path: Path) -> None:
    folder = cached_pair(TOY, "cpu", ignore)
    partial = folder.parent / f".{folder.name}.partial"
    folder.rename(partial)
    assert cached_pair(TOY, "cpu", ignore) == folder
    assert not partial.exists()
    assert len(made) == 2
    assert tmp_path in folder.parents


def test_a_folder_that_is_named_gets_the_pair_if_it_is_empty(made: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "not/yet"):
        assert new_pair(TOY, "cpu", folder, ignore) == folder
        assert is_whole(folder)
        with pytest.raises(InputError, match="is not empty"):
            new_pair(TOY, "cpu", folder, ignore)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match="is not empty"):
        new_pair(TOY, "cpu", file, ignore)
    with pytest.raises(InputError, match="name a folder that you may write"):
        new_pair(TOY, "cpu", file / "below", ignore)
    assert len(made) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_missing_is_an_error_before_anything_is_made(made: list[str], tmp_path: Path) -> None:
    for folder in ([], [str(tmp_path / "pair")]):
        with pytest.raises(InputError, match=r"(?s)so: .*nothing was run.*try: .*--device cpu"):
            run(["train", *folder, "--device", "cuda"])
    assert not made
    assert not (tmp_path / "pair").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_acceptance_on_a_gpu_asks_for_one_and_for_no_sglang(tmp_path: Path) -> None:
    """It computes with torch alone: a machine with a GPU and without SGLang runs it (docs/records/detection.md)."""
    (tmp_path / "prompts").write_text("{}\n")
    words = ["--target", str(tmp_path), "--draft", str(tmp_path), "--prompts", str(tmp_path / "prompts"), "--device", "cuda"]
    with pytest.raises(InputError, match=r"(?s)CUDA.*so: .*nothing was run") as error:
        run_command(["acceptance", *words])
    assert "sgl_kernel" not in str(error.value)


def test_a_pair_that_is_there_needs_no_gpu(made: list[str]) -> None:
    folder = cached_pair(TOY, "cpu", ignore)
    assert cached_pair(TOY, "cuda", ignore) == folder
    assert made == ["cpu"]


@pytest.mark.long
@pytest.mark.slow
def test_what_training_imports_prints_nothing_as_the_command_ends(tmp_path: Path) -> None:
    """Transformers imports Triton, whose bindings report objects that the interpreter does not collect."""
    pytest.importorskip("triton")
    done = opened(program("from transformers import LlamaForCausalLM", "info", "models"), tmp_path)
    assert done.returncode == 0
    assert not done.stderr


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(cached, "standard_library", lambda: Corpus(torch.arange(999), torch.arange(999), "none"))
    with pytest.raises(HarnessError, match=r"(?s)transformers cannot be imported.*so: .*nothing was trained.*try: .*install"):
        new_pair(TOY, "cpu", tmp_path / "pair", ignore)
    assert not list(tmp_path.iterdir())
