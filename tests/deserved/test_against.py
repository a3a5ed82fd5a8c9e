"""`acceptance` against a server: verdicts, what is printed, and what it cannot use."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eagletwin.harness.cli.main import run_command
from eagletwin.harness.commands.acceptance import against
from eagletwin.harness.core.errors import HarnessError, run_guarded
from eagletwin.harness.core.recording import Inconclusive
from eagletwin.harness.deserved.draft import default_layers, layers_in_vllm
from eagletwin.harness.deserved.precision import Rounding
from eagletwin.harness.deserved.sglang_server import SGLangServer
from eagletwin.harness.deserved.vllm_server import read_steps
from eagletwin.harness.families.store import checkpoints

from ..harness.doors import opened, program
from ..rows import spread
from .fake_server import CHUNK, MODEL, VLLM_INFO, Behaviour, serving

# `eagletwin acceptance --server`, against a server with a known fault: its verdict, its condition, the bug that it names.

pytestmark = pytest.mark.slow  # transformers is imported

SIZES = (3, 7, 12, 21, 30)


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: object
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command against such a server, in this process: the import of transformers takes seconds."""
    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input_ids": [3 + (n * i) % 90 for i in range(n)]}) + "\n" for n in SIZES))
    target, draft = map(str, checkpoints(MODEL))

    def run(behaviour: Behaviour, *more: str, new_tokens: int = 16) -> Done:
        with serving(behaviour) as url:
            words = ["--target", target, "--draft", draft, "--prompts", str(prompts), "--server", url]
            code = run_guarded(lambda: run_command(["acceptance", *words, "--new-tokens", str(new_tokens), *more]))
        out, err = capsys.readouterr()
        return Done(code, " ".join(out.split()), err)

    return run


def broken(change: Callable[[Behaviour], None]) -> Behaviour:
    behaviour = Behaviour()
    change(behaviour)
    return behaviour


def test_what_a_pair_deserves_is_kept_with_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"input_ids": [3, 4, 5]}\n')
    target, draft = map(str, checkpoints(MODEL))
    words = ["--target", target, "--draft", draft, "--prompts", "prompts.jsonl", "--new-tokens", "8"]
    assert run_guarded(lambda: run_command(["acceptance", *words])) == 0
    said = capsys.readouterr().out
    assert "page:   eagletwin-runs/acceptance/report.html" in said
    folder = tmp_path / "eagletwin-runs" / "acceptance"
    facts = json.loads((folder / "acceptance.json").read_text())
    assert (facts["texts"], facts["shape"]["num_steps"], facts["pair"]) == (1, 3, [target, draft])
    assert f"accept length {facts['accept_length']['value']:.3f}" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_healthy_server_is_equal(run: Run) -> None:
    done = run(Behaviour())
    assert done.returncode == 0, done
    assert done.stdout.startswith(f"EQUAL {3 * len(SIZES)} answers")


# And against one of vLLM.


def of_vllm(**config: object) -> Behaviour:
    return broken(lambda behaviour: setattr(behaviour, "info", {"vllm_config": VLLM_INFO["vllm_config"] | config}))


def test_a_healthy_vllm_is_equal(run: Run, tmp_path: Path) -> None:
    done = run(of_vllm())
    assert done.returncode == 0, done
    assert done.stdout.startswith(f"EQUAL {3 * len(SIZES)} answers")
    assert "vLLM 0.33.0, eagle, num_steps 3" in done.stdout
    answers = [json.loads(line) for line in (tmp_path / "eagletwin-runs/acceptance/answers.jsonl").read_text().splitlines()]
    assert all(answer["starts"] is not None for answer in answers)
    assert any(0 in answer["drafted"] for answer in answers)  # a last step that drafts nothing is a round
    assert {answer["cached"] > 0 for answer in answers if answer["way"] == "again"} == {True}
    assert not any(answer["cached"] for answer in answers if answer["way"] == "alone")


def test_a_vllm_that_loses_drafts_of_long_prompts_is_found(run: Run, tmp_path: Path) -> None:
    behaviour = of_vllm()
    behaviour.refuses = lambda prompt, cached: len(prompt) > CHUNK
    done = run(behaviour)
    assert done.returncode == 1, done
    assert facts_of(tmp_path)["condition"] == "prompts longer than a chunk"
    assert facts_of(tmp_path)["bugs"] == ["vllm-chunk-tail (in this release)"]


def test_merged_chunks_of_vllm_are_judged_by_their_count(run: Run) -> None:
    behaviour = of_vllm()
    behaviour.merges = True
    done = run(behaviour)
    assert done.returncode == 0, done
    assert "does not tell where rounds began" in done.stdout


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"speculative_config": None}, "without speculative decoding"),
        ({"observability_config": {"per_request_spec_decode_metrics": "summary"}}, "per-request-spec-decode-metrics detailed"),
        (
            {"speculative_config": {"method": "eagle", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}},
            "by the method synthetic",
        ),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}, "drafts by mtp"),
    ],
)
def test_a_vllm_that_cannot_be_compared_says_why(run: Run, config: dict[str, object], said: str) -> None:
    done = run(of_vllm(**config))
    assert done.returncode == 128, done
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("config", "reads"),
    [
        ({}, default_layers(12)),  # without numbers the two engines agree
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 6, 9]}}, (2, 5, 8)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 6, 9]}, (2, 5, 8)),
    ],
)
def test_vllm_reads_what_enters_the_layers_that_a_head_names(config: dict[str, object], reads: tuple[int, ...]) -> None:
    assert layers_in_vllm(config, 12) == reads


@pytest.mark.parametrize(
    ("chunks", "accepted", "drafted", "read"),
    [
        ([1, 3, 1], [2, 0], [3, 3], (2, (5, 8), (3, 3))),
        ([1, 3, 2], [2, 3], [3, 3], (2, (5, 8), (3, 3))),  # the text had no room for two of the last
        ([1, 3, 1], [2], [3], (2, (5, 8), (3, 0))),  # a step that drafts nothing, at the end
        ([1, 1, 3], [2], [2], (2, (5, 6), (0, 2))),  # or where a budget had no place
        ([1, 4], [2, 0], [3, 3], (2, None, None)),  # merged: two rounds by vLLM's account
        ([5], [2, 0], [3, 3], (2, None, None)),
        ([1, 5], [2], [3], (3, None, None)),  # merged with steps that draft nothing
        ([1], [], [], (0, (), ())),
    ],
)
def test_rounds_of_vllm_are_told_by_its_stream_and_its_account(
    chunks: list[int], accepted: list[int], drafted: list[int], read: object
) -> None:
    assert read_steps(5, chunks, {"per_step_accepted": accepted, "per_step_drafted": drafted}) == read


def test_merged_chunks_are_judged_by_their_count(run: Run) -> None:
    def change(behaviour: Behaviour) -> None:
        behaviour.merges = True

    done = run(broken(change))
    assert done.returncode == 0
    assert f"The stream of {3 * len(SIZES)} answers does not tell where rounds began" in done.stdout


def facts_of(tmp_path: Path) -> dict[str, Any]:
    (folder,) = (tmp_path / "eagletwin-runs").iterdir()
    facts: dict[str, Any] = json.loads((folder / "acceptance.json").read_text())
    return facts


def test_an_equal_verdict_states_the_smallest_loss_that_it_would_have_shown(run: Run, tmp_path: Path) -> None:
    done = run(Behaviour())
    assert done.returncode == 0
    power, hidden = facts_of(tmp_path)["power"], facts_of(tmp_path)["hidden_bugs"]
    every = power["every"]
    assert every["prompts"] == len(SIZES)
    assert every["drafts"] > every["one_in"] > 1
    long = power["conditions"]["prompts longer than a chunk"]
    assert long["prompts"] == sum(size > CHUNK for size in SIZES)
    assert every["drafts"] > long["drafts"] > 0
    assert hidden == {}
    page = (tmp_path / "eagletwin-runs/acceptance/report.html").read_text(encoding="utf-8")
    for said in (done.stdout, page):
        assert "that shows in 95 of 100 such runs" in said
        assert f"1 draft in {every['one_in']}" in said
        assert "The server does not say which of the prompts that were sent at once ran in one batch." in " ".join(said.split())


def test_short_prompts_are_equal_with_the_bugs_that_they_could_not_show(run: Run, tmp_path: Path) -> None:
    """The server has such a bug, and these prompts are no case of it."""

    def change(behaviour: Behaviour) -> None:
        behaviour.refuses = lambda prompt, cached: len(prompt) > CHUNK

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:3]))
    done = run(broken(change))
    assert done.returncode == 0
    assert facts_of(tmp_path)["hidden_bugs"] == {"prompts longer than a chunk": ["26329 (in this release)"]}
    assert "prompts longer than a chunk. These bugs could not show: 26329 (in this release)." in done.stdout


def test_one_prompt_is_in_no_batch(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts.read_text().splitlines(keepends=True)[-1])
    assert run(Behaviour()).returncode == 0
    assert facts_of(tmp_path)["power"]["conditions"]["batches"]["prompts"] == 0


def test_where_no_draft_is_at_stake_the_verdict_is_unknown(run: Run, tmp_path: Path) -> None:
    """The one round of each answer ends with the text, whatever it drafts: a server that accepts nothing looks the same."""

    def change(behaviour: Behaviour) -> None:
        behaviour.refuses = lambda prompt, cached: True

    done = run(broken(change), new_tokens=2)
    assert done.returncode == 125, done
    assert "a server that accepts none would look the same" in done.stdout
    assert facts_of(tmp_path)["power"]["every"]["one_in"] == 0


def test_where_chance_covers_a_server_that_accepts_nothing_the_verdict_is_unknown(run: Run) -> None:
    """Rejection sampling; the one round of each answer ends with the text."""

    def change(behaviour: Behaviour) -> None:
        behaviour.info = {**(behaviour.info or {}), "speculative_use_rejection_sampling": True}

    done = run(broken(change), "--temperature", "1", new_tokens=2)
    assert done.returncode == 125, done
    assert "Smallest loss that shows in 95 of 100 such runs" in done.stdout
    assert "A server that accepts no draft of these texts would be within chance as well." in done.stdout


def no_update(behaviour: Behaviour) -> None:
    behaviour.info = {**(behaviour.info or {}), "model_path": "first", "tokenizer_path": "first"}
    behaviour.model_info = {"model_path": "first"}


def an_update(behaviour: Behaviour) -> None:
    no_update(behaviour)
    behaviour.model_info = {"model_path": "second"}


def an_update_that_both_pages_show(behaviour: Behaviour) -> None:
    an_update(behaviour)
    behaviour.info = {**(behaviour.info or {}), "model_path": "second"}


@pytest.mark.parametrize(
    ("change", "named"),
    spread([(no_update, False), (an_update, True), (an_update_that_both_pages_show, True)], lambda row: row[1]),
)
def test_a_bug_of_new_weights_is_named_where_the_server_was_given_some(
    run: Run, tmp_path: Path, change: Callable[[Behaviour], None], named: bool
) -> None:
    def refuses(behaviour: Behaviour) -> None:
        change(behaviour)
        behaviour.refuses = lambda prompt, cached: True

    done = run(broken(refuses))
    assert done.returncode == 1
    assert ("22088" in done.stdout) == named
    assert ("22088 (fixed in 0.5.11: only a tree without the fix has it)" in facts_of(tmp_path)["bugs"]) == named


def test_where_all_prompts_are_long_a_bug_of_long_ones_is_named_too(run: Run, tmp_path: Path) -> None:
    def change(behaviour: Behaviour) -> None:
        behaviour.refuses = lambda prompt, cached: len(prompt) > CHUNK

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[-2:]))
    done = run(broken(change))
    assert done.returncode == 1, done
    assert "Each answer has this: prompts longer than a chunk. So whether rounds are lost without it" in done.stdout
    assert "no answer" in done.stdout
    assert "26329" in done.stdout


def test_a_loss_in_long_prompts_names_their_condition_and_the_bug(run: Run, tmp_path: Path) -> None:
    def change(behaviour: Behaviour) -> None:
        behaviour.refuses = lambda prompt, cached: len(prompt) > CHUNK

    done = run(broken(change))
    assert done.returncode == 1, done
    assert done.stdout.startswith("DIVERGED")
    assert "with prompts longer than a chunk alone" in done.stdout
    assert "26329" in done.stdout
    assert "in this release" in done.stdout
    assert "25015" not in done.stdout
    (folder,) = (tmp_path / "eagletwin-runs").iterdir()
    facts = json.loads((folder / "acceptance.json").read_text())
    assert facts["condition"] == "prompts longer than a chunk"
    assert {answer["prompt"] for answer in facts["answers"] if answer["wrong"]} == {3, 4}


def test_a_loss_behind_a_prefix_hit_is_told_from_others(run: Run) -> None:
    def change(behaviour: Behaviour) -> None:
        behaviour.refuses = lambda prompt, cached: cached > 0

    done = run(broken(change))
    assert done.returncode == 1, done
    assert "with prefix hits alone" in done.stdout
    assert "10846" in done.stdout


def test_a_loss_everywhere_is_one_everywhere(run: Run) -> None:
    def change(behaviour: Behaviour) -> None:
        behaviour.refuses = lambda prompt, cached: True

    done = run(broken(change))
    assert done.returncode == 1, done
    assert "under every condition" in done.stdout
    assert "25015" in done.stdout


def test_a_server_that_dies_leaves_what_was_measured(run: Run, tmp_path: Path) -> None:
    def change(behaviour: Behaviour) -> None:
        behaviour.dies_after = 4

    done = run(broken(change))
    assert done.returncode == 125, done
    assert "what was measured before is kept" in done.stdout
    (folder,) = (tmp_path / "eagletwin-runs").iterdir()
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 4
    assert len(json.loads((folder / "acceptance.json").read_text())["answers"]) == 4


def test_answers_of_another_target_are_no_verdict(run: Run) -> None:
    def change(behaviour: Behaviour) -> None:
        behaviour.says = lambda tokens: tuple((token + 1) % 90 for token in tokens)

    done = run(broken(change))
    assert done.returncode == 125, done
    assert "this target does not say" in done.stdout


def test_answers_that_cannot_be_told_are_counted_by_cause_each_with_its_remedy(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    causes = {way: Inconclusive(f"cause of {way}", f"why {way}", f"remedy of {way}") for way in ("again", "together")}
    monkeypatch.setattr(
        against,
        "why_untold",
        lambda all_seen, *_: [causes.get(one.sent.way) if one.sent.number < 3 else None for one in all_seen],
    )
    done = run(Behaviour())
    assert done.returncode == 0, done
    said = done.stdout
    assert said.startswith(f"EQUAL {3 * len(SIZES) - 6} answers")
    for way in causes:
        assert f"Of 3 more answers it cannot be told what the rounds deserve: why {way}." in said
        assert f"To have them compared, remedy of {way}." in said
    (folder,) = (tmp_path / "eagletwin-runs").iterdir()
    facts = json.loads((folder / "acceptance.json").read_text())
    told = {(one["way"], one["untold"], one["untold_cause"]) for one in facts["answers"] if one["prompt"] < 3}
    assert told == {("alone", False, ""), ("again", True, "cause of again"), ("together", True, "cause of together")}
    assert "cannot be told: cause of again" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_server_that_is_still_busy_is_waited_for(run: Run) -> None:
    def change(behaviour: Behaviour) -> None:
        behaviour.busy = 3

    assert run(broken(change)).returncode == 0


def test_a_server_that_is_never_idle_is_an_error() -> None:
    behaviour = Behaviour()
    behaviour.busy = 10**9
    with serving(behaviour) as url, pytest.raises(HarnessError, match="never idle"):
        SGLangServer(url, idle_seconds=0.2).flush()


# -- 16 bits ------------------------------------------------------------------------------------------------------------


def in_bfloat16(behaviour: Behaviour, rounds_to: torch.dtype = torch.bfloat16) -> None:
    behaviour.rounds_off = lambda: Rounding(rounds_to)
    behaviour.info = {**(behaviour.info or {}), "dtype": "bfloat16"}


def test_what_rounding_decides_is_no_loss_of_a_server_that_rounds(run: Run) -> None:
    done = run(broken(in_bfloat16))
    assert done.returncode == 0, done
    assert "Near ties in bfloat16 leave" in done.stdout


@pytest.mark.long
def test_a_server_that_rounds_more_than_its_type_is_found(run: Run) -> None:
    done = run(broken(lambda behaviour: in_bfloat16(behaviour, torch.float8_e4m3fn)))
    assert done.returncode == 1, done


def test_a_loss_is_seen_in_16_bits(run: Run) -> None:
    def change(behaviour: Behaviour) -> None:
        in_bfloat16(behaviour)
        behaviour.refuses = lambda prompt, cached: len(prompt) > CHUNK

    done = run(broken(change))
    assert done.returncode == 1, done


def quantizes(behaviour: Behaviour) -> None:
    behaviour.info = {**(behaviour.info or {}), "quantization": "fp8"}


def no_info(behaviour: Behaviour) -> None:
    behaviour.info = None


def no_speculation(behaviour: Behaviour) -> None:
    behaviour.info = {**(behaviour.info or {}), "speculative_algorithm": None}


def another_algorithm(behaviour: Behaviour) -> None:
    behaviour.info = {**(behaviour.info or {}), "speculative_algorithm": "NGRAM"}


def no_counts(behaviour: Behaviour) -> None:
    behaviour.counts = False


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (no_info, 128, "not as a server of SGLang or vLLM does"),
        (no_speculation, 128, "without speculative decoding"),
        (another_algorithm, 128, "drafts by NGRAM"),
        (no_counts, 129, "counts no verify rounds"),
        (quantizes, 128, "with quantization fp8"),
    ],
)
def test_a_server_that_cannot_be_compared_says_why(run: Run, change: Callable[[Behaviour], None], code: int, said: str) -> None:
    done = run(broken(change))
    assert done.returncode == code, done
    assert said in done.stderr
    assert "  so:  " in done.stderr
    assert "  try: " in done.stderr
    assert "Traceback" not in done.stderr


# `acceptance` as a program: what it refuses, and what it says before torch is loaded.

# What `eagletwin acceptance` cannot use: it says what is wrong, what follows and what to do, and no number.


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
