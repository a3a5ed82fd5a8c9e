"""`acceptance` as a program: what it refuses, and what it says before torch is loaded."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from eagletwin.harness.cli.main import run_command
from eagletwin.harness.core.errors import run_guarded
from eagletwin.harness.families.store import checkpoints

from ..harness.doors import opened, program
from .fake_server import Behaviour, serving

# What `eagletwin acceptance` cannot use: it says what is wrong, what follows and what to do, and no number.

pytestmark = pytest.mark.slow  # transformers is imported


@dataclass
class Words:
    """What the command is given: a pair that fits, and a prompt of it."""

    target: Path
    draft: Path
    prompts: Path
    more: tuple[str, ...] = ()


def a_target_that_is_not_there(words: Words) -> None:
    words.target = words.target / "nowhere"


def a_target_of_another_family(words: Words) -> None:
    words.target, _ = checkpoints("deepseek-nextn")


def a_draft_of_another_family(words: Words) -> None:
    _, words.draft = checkpoints("mimo-v2")


def a_draft_without_weights(words: Words) -> None:
    (words.draft / "model.safetensors").unlink()


def a_draft_that_was_cut_off(words: Words) -> None:
    file = words.draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def a_draft_that_lacks_a_tensor(words: Words) -> None:
    from safetensors.torch import load_file, save_file

    file = words.draft / "model.safetensors"
    tensors = load_file(file)
    del tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, file)


def a_draft_of_other_sizes(words: Words) -> None:
    file = words.draft / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_attention_heads": config["num_attention_heads"] * 2}))


def a_draft_of_another_target(words: Words) -> None:
    _, words.draft = checkpoints("llama-eagle3")


def no_prompts(words: Words) -> None:
    words.prompts.unlink()


def a_line_that_is_no_prompt(words: Words) -> None:
    words.prompts.write_text('{"input_ids": [3, "four"]}\n')


def a_prompt_of_text_without_a_tokenizer(words: Words) -> None:
    words.prompts.write_text("a text\n")


def a_prompt_longer_than_the_context(words: Words) -> None:
    context = json.loads((words.target / "config.json").read_text())["max_position_embeddings"]
    words.prompts.write_text(json.dumps({"input_ids": [3] * context}) + "\n")


def a_token_outside_the_vocabulary(words: Words) -> None:
    words.prompts.write_text('{"input_ids": [3, 9999]}\n')


def a_server_that_is_not_there(words: Words) -> None:
    words.more = ("--server", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (a_target_that_is_not_there, "is no folder"),
        (a_target_of_another_family, "is a target of type"),
        (a_draft_of_another_family, "which the reference does not know"),
        (a_draft_without_weights, "holds no *.safetensors"),
        (a_draft_that_was_cut_off, "cannot be read"),
        (a_draft_that_lacks_a_tensor, "no tensor layers.0.mlp.up_proj.weight"),
        (a_draft_of_other_sizes, "has tensors of other sizes"),
        (a_draft_of_another_target, "the target hands over"),
        (no_prompts, "cannot be read"),
        (a_line_that_is_no_prompt, "prompts.jsonl:1 is no prompt"),
        (a_prompt_of_text_without_a_tokenizer, "has no tokenizer"),
        (a_prompt_longer_than_the_context, "longer than the target's context"),
        (a_token_outside_the_vocabulary, "the text has the token 9999"),
        (a_server_that_is_not_there, "http://127.0.0.1:9"),
    ],
)
def test_it_says_cause_consequence_and_remedy(
    spoil: Callable[[Words], None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    target, draft = checkpoints("llama-gqa")
    words = Words(target, tmp_path / "draft", tmp_path / "prompts.jsonl")
    shutil.copytree(draft, words.draft)
    words.prompts.write_text('{"input_ids": [3, 4, 5]}\n')
    spoil(words)
    given = ["--target", str(words.target), "--draft", str(words.draft), "--prompts", str(words.prompts), "--new-tokens", "8"]
    code = run_guarded(lambda: run_command(["acceptance", *given, *words.more]))
    told = capsys.readouterr()
    assert code in (128, 129), told
    assert said in told.err
    assert "  so:  " in told.err
    assert "  try: " in told.err
    assert "Traceback" not in told.err
    assert "deserved" not in told.out


def test_an_eagle3_head_that_is_served_as_eagle_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"input_ids": [3, 4, 5, 6]}\n')
    target, draft = map(str, checkpoints("llama-eagle3"))
    behaviour = Behaviour()  # started with EAGLE
    behaviour.says = lambda tokens: tuple(token % 96 for token in tokens)
    with serving(behaviour) as url:
        words = ["--target", target, "--draft", draft, "--prompts", "prompts.jsonl", "--new-tokens", "8", "--server", url]
        assert run_guarded(lambda: run_command(["acceptance", *words])) in (1, 125)
    said = " ".join(capsys.readouterr().out.split())
    assert "The draft is an EAGLE-3 head, and the server was started with EAGLE: start it with EAGLE3." in said


# Torch's threads sleep while they wait: the commands that compute say so before torch is loaded, which is when it is read.

# Says what torch's OpenMP will read, when somebody first looks for torch.
WATCH = """
import os
os.environ.pop("OMP_WAIT_POLICY", None)
class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.meta_path.remove(self)
            print("policy", os.environ.get("OMP_WAIT_POLICY"))
sys.meta_path.insert(0, Watch())
"""


@pytest.mark.slow  # imports torch
def test_threads_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "x").touch()  # no checkpoint: the command ends behind its imports
    done = opened(
        program(WATCH, "acceptance", "--target", "x", "--draft", "x", "--prompts", "x"), tmp_path, path=tmp_path
    )  # a process of its own, which has no torch yet
    assert "policy PASSIVE" in done.stdout, done
