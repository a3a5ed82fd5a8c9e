"""What running a property results in, each way, on SGLang with an edit in the function that it is about; and what all of them
amount to."""

import pytest

from eagletwin.harness.commands.kernels import runner
from eagletwin.harness.commands.kernels.properties import ALL
from eagletwin.harness.commands.kernels.release import EAGLE, Absent, find
from eagletwin.harness.commands.kernels.results import (
    FaultsCaught,
    Function,
    PropertyJob,
    PropertyOutcome,
    Report,
    Status,
    line,
)
from eagletwin.harness.commands.kernels.runtime import plant_fault
from eagletwin.harness.core.differs import Differs
from eagletwin.harness.core.patch import Edit

KERNEL, CALLER = f"{EAGLE}._draft_extend_inputs_kernel", f"{EAGLE}.prepare_draft_extend_inputs"
EXPRESSION = "offset * WIDTH + accepted - 1"
INPUTS = next(of for of in ALL if of.name == "draft extend gets its inputs")


def outcome(text: str, replacement: str, seed: int = 0, trial: bool = False) -> PropertyOutcome:
    job = PropertyJob(
        version="",
        root="",
        properties=(INPUTS.name,),
        functions=(KERNEL,),
        kernels="fast",
        examples=120,
        seed=seed,
        trial=trial,
    )
    with plant_fault(Edit(target=KERNEL, match=text, replacement=replacement)):
        return runner.outcome(INPUTS, job)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_wrong_output_diverges_whatever_the_seed(seed: int) -> None:
    found = outcome(EXPRESSION, "offset * WIDTH + accepted", seed)
    assert (found.status, found.what, found.expected, found.actual) == ("diverged", "select_index at [0]", "[1]", "[2]")
    assert found.case.startswith("Verified(batch=Batch(topk=1, num_steps=1, nodes=2,")
    assert found.functions == (KERNEL, CALLER)


def test_an_access_outside_of_a_tensor_diverges() -> None:
    found = outcome("tl.store(select + offset,", "tl.store(select + 100000 + offset,")
    assert (found.status, found.what) == ("diverged", "OutOfBounds")
    assert "select" in found.detail


def test_a_function_that_cannot_run_is_unknown() -> None:
    found = outcome(EXPRESSION, "offset.nothing")
    assert found.status == "unknown"
    assert found.detail
    assert outcome(EXPRESSION, "offset.nothing", trial=True).status == "unknown"


def test_a_refactored_function_is_equal_and_a_case_must_fail_when_it_does_nothing() -> None:
    found = outcome(EXPRESSION, "accepted - 1 + WIDTH * offset")
    assert (found.status, found.proofs) == ("equal", (FaultsCaught(KERNEL, 1, 1, silenced=True),))
    assert line(found).endswith("120 examples, 1 of 1 planted fault caught, 1 fault without a place in this source")


def test_a_planted_fault_that_no_case_catches_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(INPUTS), "failing", lambda *_: None)
    found = runner.proof(INPUTS, KERNEL, runner.same_cases(1), None)
    assert found.missed == ("'offset * WIDTH + accepted - 1' as 'accepted - 1'",)


def test_a_name_that_is_nowhere_is_absent() -> None:
    with pytest.raises(Absent, match=r"this SGLang has no sglang\.kernels\.ops\.speculative\.eagle\.nothing"):
        find(f"{EAGLE}.nothing")


TREE = Differs(base="1", functions=("a.b",))
EXIT_CODES: list[tuple[int, tuple[Status, ...], bool, bool, Differs | None, str]] = [
    # code, what the properties of a, b, … resulted in, whether they were named, whether it is a tree, its changes, an early end
    (0, ("equal", "equal"), False, True, None, ""),
    (0, ("equal", "absent"), False, False, None, ""),
    (125, ("equal", "absent"), False, True, None, ""),
    (125, ("equal", "absent"), True, False, None, ""),
    (125, ("absent",), False, False, None, ""),
    (125, (), False, False, None, ""),
    (125, ("equal", "unknown"), False, False, None, ""),
    (1, ("equal", "unknown", "diverged"), False, False, None, ""),
    (125, ("equal",), False, False, None, "the process was ended by SIGKILL"),
    (1, ("diverged",), False, False, None, "the process was ended by SIGKILL"),
    (125, ("equal",), False, True, TREE, ""),
    (0, ("equal",), False, True, Differs(base="1", functions=("a.b",), ran=("a.b",)), ""),
]


@pytest.mark.parametrize(("code", "statuses", "named", "tree", "differs", "end"), EXIT_CODES)
def test_exit_codes(
    code: int, statuses: tuple[Status, ...], named: bool, tree: bool, differs: Differs | None, end: str
) -> None:
    names = tuple("abc"[: len(statuses)])
    report = Report(named=names if named else (), strict=tree, differs=differs, end=end)
    report.functions = [Function(name, where=name) for name in names]
    report.outcomes = [
        PropertyOutcome(property=n, status=status, functions=(n,)) for n, status in zip(names, statuses, strict=True)
    ]
    assert report.exit_code == code


def test_a_module_that_is_there_and_cannot_be_imported_is_unknown() -> None:
    report = Report(named=(), strict=False, functions=[Function("a", where="a"), Function("b", why="SyntaxError", broken=True)])
    report.outcomes = [PropertyOutcome(property="a", status="equal", functions=("a",))]
    assert report.exit_code == 125
