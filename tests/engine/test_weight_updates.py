"""A worker that is given new weights runs on them, target and draft; one that keeps some of the old ones is seen."""

import importlib.util
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, SGLangSettings, WeightPath
from eagletwin.harness.core.patch import Edit

from ..rows import spread
from .conftest import Runner

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
OF_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
BUCKET = "sglang.srt.weight_sync.tensor_bucket.FlattenedTensorBucket"
DRAFT_ALONE = 'self._select_runners("draft")'
SELECTED = "self._select_runners(recv_req.selector)"

# Fault -> the paths that it is of, its edit, and the rule that names it first.
PLANTED: dict[str, tuple[tuple[WeightPath, ...], Edit, str]] = {
    "tensors reach the draft alone": (
        ("tensor", "tensor_bucket"),
        Edit(target=f"{UPDATER}.update_weights_from_tensor", match=SELECTED, replacement=DRAFT_ALONE),
        "target.kv",
    ),
    "broadcasts reach the draft alone": (
        ("distributed", "distributed_bucket"),
        Edit(target=f"{UPDATER}.update_weights_from_distributed", match=SELECTED, replacement=DRAFT_ALONE),
        "target.kv",
    ),
    "broadcasts reach the target alone": (
        ("distributed", "distributed_bucket"),
        Edit(target=f"{UPDATER}.update_weights_from_distributed", match=SELECTED, replacement='self._select_runners("target")'),
        "draft.kv",
    ),
    "a broadcast is loaded before it has come": (
        ("distributed",),
        Edit(
            target=f"{OF_RUNNER}.receive_weights_from_distributed",
            match="weights.append((name, weight))",
            replacement="weights.append((name, torch.zeros_like(weight)))",
        ),
        "target.kv",
    ),
    "tensors of a bucket are one place off": (
        ("tensor_bucket", "distributed_bucket"),
        Edit(
            target=f"{BUCKET}.reconstruct_tensors",
            match="self.flattened_tensor[meta.start_idx : meta.end_idx]",
            replacement="self.flattened_tensor.roll(-4)[meta.start_idx : meta.end_idx]",
        ),
        "target.kv",
    ),
}


def by(path: WeightPath) -> Case:
    settings = EngineSettings(sglang=SGLangSettings(update_weights=path))
    return replace(LEDGER["22088"].case, name=f"by-{path}", model="llama-gqa", num_steps=3, engine=settings)


@pytest.mark.parametrize("path", get_args(WeightPath))
def test_new_weights_reach_target_and_draft(run: Runner, path: WeightPath) -> None:
    _, verdict = run(by(path))
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)


@pytest.mark.parametrize(
    ("fault", "path"),
    spread([(fault, path) for fault, (paths, _, _) in PLANTED.items() for path in paths], lambda row: PLANTED[row[0]][2]),
)
def test_a_planted_fault_is_named_by_its_rule(run: Runner, fault: str, path: WeightPath) -> None:
    _, edit, rule = PLANTED[fault]
    _, verdict = run(by(path), edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict.reason, verdict.first)


def test_updates_by_ipc_need_a_package_that_knows_gpus_alone() -> None:
    """If this is red, `update_weights_from_ipc` may run on a CPU: case.md says why it does not."""
    assert importlib.util.find_spec("checkpoint_engine") is None
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "srt" / "checkpoint_engine" / "checkpoint_engine_worker.py").read_text()
    assert "from checkpoint_engine.worker import update_weights_from_ipc" in source
