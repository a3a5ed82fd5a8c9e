"""A worker that is given new weights runs on them, target and draft; one that keeps some of the old ones is seen."""

from msgspec.structs import replace

from eagletwin.cases.regressions import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, SGLangSettings
from eagletwin.harness.core.patch import Edit

from .conftest import Runner

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def by(path: str) -> Case:
    settings = EngineSettings(sglang=SGLangSettings(update_weights=path))  # type: ignore[arg-type]
    return replace(LEDGER["22088"].case, name=f"by-{path}", model="llama-gqa", num_steps=3, engine=settings)


def test_tensors_reach_target_and_draft(run: Runner) -> None:
    assert run(by("tensor"))[1].status == "equal"


def test_an_update_that_reaches_the_draft_alone_is_seen(run: Runner) -> None:
    edit = Edit(
        target=f"{UPDATER}.update_weights_from_tensor",
        match="self._select_runners(recv_req.selector)",
        replacement='self._select_runners("draft")',
    )
    assert run(by("tensor"), edit)[1].rule == "target.kv"
