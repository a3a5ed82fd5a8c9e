"""The kernel tier: its table of properties, and the runner of its properties."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings

from eagletwin.harness.commands.kernels import runner
from eagletwin.harness.commands.kernels.properties import ALL
from eagletwin.harness.commands.kernels.release import (
    EAGLE,
    LOCS,
    MOVE,
    PACK,
    ROTATE,
    SAMPLING,
    TOPK1,
    TREE,
    Absent,
    find,
    module,
)
from eagletwin.harness.commands.kernels.results import (
    FaultsCaught,
    Function,
    PropertyJob,
    PropertyOutcome,
    Report,
    Status,
    line,
)
from eagletwin.harness.commands.kernels.runtime import plant_fault, silence_function
from eagletwin.harness.commands.kernels.tier import Property, same_cases
from eagletwin.harness.commands.kernels.trees import Batch, batches
from eagletwin.harness.core.differs import Differs
from eagletwin.harness.core.patch import Edit

# The tier about itself: nothing is listed without a planted fault, no kernel passes by doing nothing, cases reach corners.

DOCUMENT = Path(__file__).parents[2] / "docs/explanation/kernels.md"

# Kernels of the same modules that are not in the tier, and why.
ELSEWHERE = {
    "_translate_token_ids": "called by the kernels that list slots, with them",
    "_load_token_ids": "called by the kernels that list slots, with them",
    "rebuild_compact_draft_req_to_token": "DFLASH",
    "set_kv_buffer_prefix_valid_tiled": "DSpark",
    "set_kv_buffer_prefix_valid_tiled_fp8": "DSpark",
    "_saturate_to_fp8_range": "DSpark",
    "stash_append_boundary_state_kernel": "multi-layer EAGLE on hybrid models",
    "fill_widened_draft_extend_inputs_kernel": "multi-layer EAGLE on hybrid models",
    "compute_widened_draft_extend_locs_positions_kernel": "multi-layer EAGLE on hybrid models",
    "fill_draft_extend_prepare_buffers_kernel": "multi-layer EAGLE under a CUDA graph",
    "_wide_row_softmax_partials_kernel": "multi-layer EAGLE's softmax",
    "_wide_row_softmax_finalize_kernel": "multi-layer EAGLE's softmax",
    "_wide_row_softmax_write_kernel": "multi-layer EAGLE's softmax",
}


def kernel_at(target: str) -> object:
    """The jit function of this dotted name; None if it is another kind of function, or absent."""
    try:
        found = find(target)[1]
    except Absent:
        return None
    return found if hasattr(found, "fn") else None


def kernels() -> dict[str, list[Property]]:
    """Every jit function that a fault is planted in, and the properties that it has one for."""
    targets = dict.fromkeys(target for of in ALL for target in of.functions if kernel_at(target) is not None)
    return {target: [of for of in ALL if target in of.functions] for target in targets}


def test_every_property_that_the_table_names_is_in_the_tier() -> None:
    table = DOCUMENT.read_text().partition("| property | reached by |\n|---|---|\n")[2].partition("\n\n")[0]
    named = re.findall(r"^\| ([\w ]+) \|", table, re.MULTILINE)
    assert len(named) > 10
    assert set(named) <= {of.name for of in ALL}


@pytest.mark.parametrize("name", [TREE, SAMPLING, TOPK1, EAGLE, PACK, LOCS, MOVE, ROTATE])
def test_every_kernel_of_these_modules_is_in_the_tier_or_said_not_to_be(name: str) -> None:
    found = {function for function in vars(module(name)) if kernel_at(f"{name}.{function}") is not None}
    mine = {function for function in found if vars(module(name))[function].fn.__module__ == name}
    assert mine, name
    assert mine - ELSEWHERE.keys() == {target.rpartition(".")[2] for target in kernels() if target.startswith(f"{name}.")}


def test_no_kernel_passes_that_does_nothing(config: settings) -> None:
    for target, properties in kernels().items():
        for of in properties:
            with silence_function(target):
                assert of.failing(config) is not None, f"{of.name} held while {target} did nothing"


def test_a_fault_is_gone_after_its_block() -> None:
    for of in (ALL[0], ALL[-1]):
        for fault in of.faults:
            with plant_fault(fault):
                pass
        of.check(same_cases(10))


def test_a_fault_that_does_not_fit_is_an_error() -> None:
    for target in (f"{TREE}.sgl_build_tree_kernel_efficient_triton", f"{TREE}.sgl_build_tree_kernel_triton"):
        with (
            pytest.raises(Exception, match="occurs 0 times, not once"),
            plant_fault(Edit(target=target, match="§", replacement="")),
        ):
            pass


def test_cases_reach_corners(config: settings) -> None:
    seen: set[str] = set()

    @config
    @given(batches())
    def look(batch: Batch) -> None:
        seen.add(f"topk {batch.topk}")
        seen.add(f"{batch.num_steps} steps")
        seen.add(f"{len(batch.trees)} requests")
        for tree in batch.trees:
            parents = tree.parents
            seen.add("siblings" if len(set(parents)) < len(parents) else "a chain")
            seen.add(f"a path of {max(map(len, _paths(parents)))} nodes")

    look()
    wanted = {f"{n} {what}" for what, most in (("steps", 5), ("requests", 4)) for n in range(1, most)} | {"0 requests"}
    wanted |= {f"topk {n}" for n in range(1, 5)} | {"siblings", "a chain"} | {f"a path of {n} nodes" for n in range(2, 6)}
    assert wanted <= seen


def _paths(parents: list[int]) -> list[list[int]]:
    from eagletwin.reference.tree import leaf_paths

    return leaf_paths(parents)


# What running a property results in, each way, on SGLang with an edit in the function that it is about; and what all of them
# amount to.

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


CHANGED_TREE = Differs(base="1", functions=("a.b",))
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
    (125, ("equal",), False, True, CHANGED_TREE, ""),
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
