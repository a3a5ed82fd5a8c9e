"""SGLang's kernels in the fast runtime: all of them run there, it stores what Triton's interpreter stores, and what it finds
wrong is a verdict."""

from pathlib import Path

import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Kernels
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import long


@pytest.mark.parametrize("kernels", ["fast", "checked", *long("interpreter", "shadow")])
def test_a_case_is_equal_whatever_executes_the_kernels(host: Host, busy_case: Case, tmp_path: Path, kernels: Kernels) -> None:
    trace = host.engine(busy_case, kernels=kernels).run(busy_case, tmp_path)
    assert judge(trace).status == "equal", trace.header.ending
    assert trace.header.engine.kernels == kernels
    assert trace.header.fallbacks == ()  # none of the worker's kernels runs unchecked


def test_no_kernel_is_compiled_in_the_process_of_a_case(host: Host, busy_case: Case, tmp_path: Path) -> None:
    """It would be compiled again in each case: the zygote compiles all that cases launch, before the forks."""
    match = "tree = ast.parse("
    compiles = Edit(target="eagletwin.harness.engines.triton_cpu.compiler._compile", match=match, replacement=match)
    trace = host.engine(busy_case, (Patch(name="compiles", edits=(compiles,)),)).run(busy_case, tmp_path)
    assert trace.header.ending.kind == "finished", trace.header.ending
    assert trace.header.idle_edits == (compiles.target,)


FAR_SLOTS = Edit(
    target="sglang.srt.layers.attention.triton_backend.TritonAttnBackend._forward_extend_kernel",
    match="return self.extend_attention_fwd(*args, **kwargs)",
    replacement=(
        "slots = self.forward_metadata.kv_indices\n"
        "args = [arg + 10**5 if arg is slots and arg is not None else arg for arg in args]\n"
        "return self.extend_attention_fwd(*args, **kwargs)"
    ),
)


def test_memory_outside_a_tensor_is_a_verdict_that_names_kernel_line_program_argument_and_offset(
    host: Host, busy_case: Case, tmp_path: Path
) -> None:
    """Attention reads slots past the end of the pool, which Triton's interpreter, and many a GPU, does in silence."""
    trace = host.engine(busy_case, (Patch(name="far", edits=(FAR_SLOTS,)),)).run(busy_case, tmp_path)
    verdict = judge(trace)
    assert (verdict.status, verdict.rule) == ("diverged", "kernel.memory"), (verdict, trace.header.ending)
    assert verdict.first is not None
    for part in ("OutOfBounds: kernel '_fwd_kernel'", ".py:", "in program (", "argument 'K_Buffer'"):
        assert part in verdict.first.actual


def test_unwritten_memory_is_undefined_wherever_it_was_made(host: Host, busy_case: Case, tmp_path: Path) -> None:
    """A tensor of torch.empty is handed to attention; whatever it held would have come from the allocator."""
    unwritten = Edit(
        target=FAR_SLOTS.target,
        match=FAR_SLOTS.match,
        replacement="return self.extend_attention_fwd(torch.empty_like(args[0]), *args[1:], **kwargs)",
    )
    trace = host.engine(busy_case, (Patch(name="unwritten", edits=(unwritten,)),), "checked").run(busy_case, tmp_path)
    verdict = judge(trace)
    assert (verdict.status, verdict.rule) == ("diverged", "kernel.undefined"), (verdict, trace.header.ending)
    assert verdict.first is not None
    assert "kernel '_fwd_kernel'" in verdict.first.actual


@pytest.mark.long
def test_where_stores_are_not_checked_a_guard_behind_draft_decodes_lists_does(host: Host, tmp_path: Path) -> None:
    """As on a GPU: Triton's interpreter stores at any address."""
    entry = LEDGER["indices-overflow"]
    verdicts = []
    for side in (entry.green, entry.red):
        (tmp_path / str(len(verdicts))).mkdir()
        engine = host.engine(entry.case, side.patches, "interpreter")
        verdicts.append(judge(engine.run(entry.case, tmp_path / str(len(verdicts)))))
    assert [verdict.status for verdict in verdicts] == ["equal", "diverged"]
    assert verdicts[1].rule == "kernel.memory"
    assert verdicts[1].first is not None
    assert "1 stores behind the end of an int64 tensor of shape (5, 16), the last 1 elements" in verdicts[1].first.actual


def test_stores_of_programs_to_one_place_are_a_dependence_on_their_order(host: Host, busy_case: Case, tmp_path: Path) -> None:
    """Attention is handed an output of which all heads share the memory of the first."""
    shared = Edit(
        target=FAR_SLOTS.target,
        match=FAR_SLOTS.match,
        replacement=f"args = (*args[:3], args[3][:, :1].expand_as(args[3]), *args[4:])\n{FAR_SLOTS.match}",
    )
    trace = host.engine(busy_case, (Patch(name="shared", edits=(shared,)),), "checked").run(busy_case, tmp_path)
    verdict = judge(trace)
    assert (verdict.status, verdict.rule) == ("diverged", "kernel.order"), (verdict, trace.header.ending)


def test_a_runtime_that_stores_other_numbers_than_the_interpreter_is_found(host: Host, busy_case: Case, tmp_path: Path) -> None:
    """A difference of floats is too large by a thousandth, in the fast runtime alone."""
    wrong = Edit(
        target="eagletwin.harness.engines.triton_cpu.values.sub",
        match="result = a - b",
        replacement=(
            'result = a - b\nif getattr(result, "dtype", None) == "float32":\n    result = result * result.dtype.type(1.001)'
        ),
    )
    trace = host.engine(busy_case, (Patch(name="wrong", edits=(wrong,)),), "shadow").run(busy_case, tmp_path)
    verdict = judge(trace)
    assert (verdict.status, verdict.rule) == ("diverged", "kernel.shadow"), (verdict, trace.header.ending)
