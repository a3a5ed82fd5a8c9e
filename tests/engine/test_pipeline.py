"""SGLang's pipeline of two stages with EAGLE runs on two ranks of a CPU, and answers as the reference decodes.

No case has a pipeline yet: what its stages hand on is judged by the answers alone. If SGLang changes so that it does not start
here any more, this is red, and acceptance-fell.md is to say so.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagletwin.harness.core.case import Case, Request, encode_case
from eagletwin.harness.engines.sglang.processes.rank_group import free_port
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.llama import target_rows

ROOT = Path(__file__).parents[2]
CASE = Case(
    name="pipeline",
    model="llama-gqa",
    num_steps=3,
    requests=(
        Request(id="a", prompt=(7, 19, 3, 4, 5, 6), max_new_tokens=9),
        Request(id="b", prompt=(90, 12, 55), max_new_tokens=12),
        Request(id="c", prompt=(33,), max_new_tokens=7),
    ),
)
REBUILD = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin._pp_spec_rebuild_verify_input"
SEND = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin._pp_prepare_tensor_dict"
FAULTS = {
    "the root of a relayed tree is another token": (
        REBUILD,
        "bonus_tokens = tree_rows[:, 0].contiguous()",
        "bonus_tokens = (tree_rows[:, 0].contiguous() + 1) % 128",
    ),
    "trees are relayed to other requests": (
        REBUILD,
        "tree_rows = relay.tokens.to(device=device, dtype=torch.int64)",
        "tree_rows = relay.tokens.to(device=device, dtype=torch.int64).roll(1, 0)",
    ),
    "the last stage accepts one token less than it says": (
        SEND,
        'tensor_dict["spec_accept_lens"] = result.accept_lens',
        'tensor_dict["spec_accept_lens"] = (result.accept_lens - 1).clamp(min=1)',
    ),
}


def answers(folder: Path, *fault: str) -> dict[str, list[int]]:
    """What the pipeline sends; nothing if it ends before it has sent all."""
    (folder / "case.json").write_bytes(encode_case(CASE))
    command = [sys.executable, "-m", "tests.engine.pipeline", str(folder / "case.json"), str(free_port()), *fault]
    environment = os.environ | {"TMPDIR": str(folder)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    said = [line for line in run.stdout.splitlines() if line.startswith("{")]
    found: dict[str, list[int]] = json.loads(said[-1]) if said else {}
    return found


def decoded() -> dict[str, list[int]]:
    weights, shape, found = model_pair(CASE.model).reference_target(), RECIPES[CASE.model].target, {}
    for request in CASE.requests:
        tokens = list(request.prompt)
        for _ in range(request.max_new_tokens):
            tokens.append(int(target_rows(weights, shape, torch.tensor(tokens)).logits[-1].argmax()))
        found[request.id] = tokens[len(request.prompt) :]
    return found


@pytest.mark.slow
def test_two_stages_answer_as_the_reference_decodes(tmp_path: Path) -> None:
    assert answers(tmp_path) == decoded()


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_is_seen_in_the_answers(tmp_path: Path, fault: str) -> None:
    found, right = answers(tmp_path, *FAULTS[fault]), decoded()
    assert {name: len(tokens) for name, tokens in found.items()} == {name: len(tokens) for name, tokens in right.items()}
    assert found != right
