"""`train` as its users see it: four checkpoints that load, made once, whole or not at all."""

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagletwin.harness.cli.main import typed
from eagletwin.harness.core.errors import HarnessError, InputError
from eagletwin.harness.deserved.checkpoint import checkpoint
from eagletwin.harness.deserved.texts import read_prompts
from eagletwin.reference.draft_heads import proposed_tokens
from eagletwin.reference.llama import target_rows

from ..harness.doors import opened, program
from .__main__ import run
from .toy import TOY, short_text
from .train import cached
from .train.cached import cached_pair, is_whole, new_pair
from .train.heads import draft_plans
from .train.pair import FACTS, PARTS, PROMPTS, make_pair
from .train.settings import BEGIN, END, PairSettings
from .train.text import Corpus

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
        typed(["acceptance", *words])
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
