"""A window of the draft alone (--speculative-draft-window-size, --speculative-draft-sink-size), in the real worker."""

from collections.abc import Callable

import msgspec
import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.families.valid import check_case

from ..rows import long
from .conftest import Runner

STEPS = "sglang.srt.layers.attention.triton_backend.TritonMultiStepDraftBackend.common_template"
CHAIN = Case(
    name="draft-window-chain",
    model="llama-tiny",
    num_steps=3,
    requests=(
        Request(id="a", prompt=tuple(range(1, 13)), max_new_tokens=10),
        Request(id="b", prompt=(1, 2, 3), max_new_tokens=8, arrive=2),
    ),
    engine=EngineSettings(sglang=SGLangSettings(draft_window=4, draft_sink=2)),
    exercises=("draft_decode", "batch"),
)
TREE = msgspec.structs.replace(
    CHAIN, name="draft-window-tree", num_steps=4, topk=3, num_draft_tokens=10, page_size=4, exercises=("tree", "branch_holes")
)
LATENT = msgspec.structs.replace(CHAIN, name="draft-window-latent", model="deepseek-nextn")
LATENT_EAGLE3 = msgspec.structs.replace(CHAIN, name="draft-window-latent-eagle3", model="kimi-k2-eagle3")


def with_settings(**fields: int) -> Callable[[Case], Case]:
    settings = EngineSettings(sglang=SGLangSettings(**fields))  # type: ignore[arg-type]
    return lambda case: msgspec.structs.replace(case, engine=settings)


@pytest.mark.parametrize("case", [CHAIN, TREE, LATENT, LATENT_EAGLE3], ids=lambda case: case.name)
def test_the_release_is_right(run: Runner, case: Case) -> None:
    _, verdict = run(case)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("case", [*long(CHAIN), TREE], ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("match", "replacement"),
    [
        ("self.draft_window_size,", "self.draft_window_size - 1,"),
        ("self.draft_window_size,", "self.draft_window_size + 1,"),
        ("self.draft_sink_size,", "0,"),
        ("self.draft_window_size,", "0,"),
    ],
    ids=["a row short", "a row long", "no sink", "no window"],
)
def test_another_window_is_seen(run: Runner, case: Case, match: str, replacement: str) -> None:
    _, verdict = run(case, Edit(target=STEPS, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", "draft.proposal"), verdict


def test_a_head_with_a_window_of_its_own_is_wrong_in_draft_extend_and_right_with_the_fix(run: Runner) -> None:
    """Live: docs/findings/draft-window. A longer case than the entry's, in which draft decode runs as well."""
    remedy = LEDGER["draft-window"].remedy
    assert remedy is not None
    case = msgspec.structs.replace(
        CHAIN, name="draft-window-eagle3", model="llama-eagle3", engine=EngineSettings(sglang=SGLangSettings(draft_window=4))
    )
    _, verdict = run(case)
    assert (verdict.status, verdict.rule) == ("diverged", "draft.hidden_in"), verdict
    _, verdict = run(case, *remedy.edits)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize(
    ("model", "fields", "why"),
    [
        ("llama-tiny", {"draft_sink": 2}, "draft_sink 2 without draft_window"),
        ("llama-mtp", {"draft_window": 4}, "a multi-layer draft has no draft decode"),
        ("llama-standalone", {"draft_window": 4}, "STANDALONE has no window of draft decode"),
        ("llama-eagle3", {"draft_window": 4, "draft_sink": 1}, "the window of an EAGLE-3 head has no sink"),
    ],
)
def test_a_window_that_sglang_would_leave_out_is_refused(model: str, fields: dict[str, int], why: str) -> None:
    with pytest.raises(InputError, match=why):
        check_case(msgspec.structs.replace(with_settings(**fields)(CHAIN), model=model), "case")
