"""SGLang's kernels in the fast runtime, and in Triton's interpreter where it does not know one; what taps read of pools."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.ledger.windows import _MASK_OF_WINDOW
from eagletwin.harness.check.argument import argue
from eagletwin.harness.cli.main import run_command
from eagletwin.harness.commands.prove.proof import prove
from eagletwin.harness.core.case import Case, SGLangSettings, pretty_case
from eagletwin.harness.core.errors import EXIT_UNKNOWN
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import KEY_POISON, VALUE_POISON
from eagletwin.harness.core.run_spec import Kernels
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.sglang.taps.pools import Allocation, Pool
from eagletwin.harness.judge.judge import judge

from ..rows import long, spread
from . import forked
from .conftest import Runner
from .test_states import BATCH, POOL

pytest_plugins = ["pytester"]


# SGLang's kernels in the fast runtime: all of them run there, it stores what Triton's interpreter stores, and what it finds
# wrong is a verdict.


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


# A kernel that the fast runtime does not know runs in Triton's interpreter, where no rule kernel.* is checked: every report
# says so, and where these rules were asked for the verdict is unknown.


# As if attention were written in a way that the fast runtime does not execute.
UNKNOWN_KERNEL = Patch(
    name="unknown-kernel",
    edits=(
        Edit(
            target="eagletwin.harness.engines.triton_cpu.compiler.compile_kernel",
            match="entry = _cache.get(fn)",
            replacement=(
                "entry = _cache.get(fn)\n"
                "if fn.__name__ == '_fwd_kernel':\n"
                "    from eagletwin.harness.engines.triton_cpu.state import Unsupported\n"
                "    raise Unsupported('a construct of tomorrow')"
            ),
        ),
    ),
)
LINE = "Not checked by kernel.*, since Triton's interpreter ran it: _fwd_kernel: a construct of tomorrow."


@pytest.fixture(scope="module")
def small(busy_case: Case) -> Case:
    requests = (msgspec.structs.replace(busy_case.requests[1], arrive=0, max_new_tokens=2),)
    return msgspec.structs.replace(busy_case, name="small", requests=requests)


def ran(host: Host, case: Case, folder: Path, kernels: Kernels) -> Trace:
    trace = host.engine(case, (UNKNOWN_KERNEL,), kernels).run(case, folder)
    assert trace.header.fallbacks == ("_fwd_kernel: a construct of tomorrow",), trace.header.ending
    return trace


def test_the_report_of_an_equal_case_names_the_kernel(host: Host, small: Case, tmp_path: Path) -> None:
    trace = ran(host, small, tmp_path, "fast")
    verdict = judge(trace)
    assert verdict.status == "equal"
    assert LINE in re.sub(r"\s+", " ", argue(trace.header, verdict, trace=trace))


@pytest.mark.parametrize("kernels", ["checked", *long("shadow")])
def test_where_the_rules_of_kernels_were_asked_for_it_is_unknown(
    host: Host, small: Case, tmp_path: Path, kernels: Kernels
) -> None:
    trace = ran(host, small, tmp_path, kernels)
    verdict = judge(trace)
    assert (verdict.status, verdict.vacuous) == ("unknown", False)
    assert "_fwd_kernel" in verdict.reason
    off = frozenset({"kernel.memory", "kernel.undefined", "kernel.order", "kernel.shadow"})
    assert judge(trace, off).status == "equal"


def test_judging_the_trace_again_says_it_as_well(
    host: Host, small: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(host, small, tmp_path, "checked")
    assert run_command(["judge", str(tmp_path)]) == EXIT_UNKNOWN
    assert LINE in re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.long
def test_a_proof_of_a_rule_of_kernels_does_not_hold_where_a_kernel_was_not_checked(host: Host, tmp_path: Path) -> None:
    entry: Entry = LEDGER["indices-overflow"]
    assert entry.remedy is not None
    remedy = Patch(name=entry.remedy.name, edits=(*entry.remedy.edits, *UNKNOWN_KERNEL.edits))
    (proof,) = prove(host, [replace(entry, remedy=remedy)], tmp_path)
    assert proof.green.verdict.status == "equal"
    assert not proof.holds
    assert proof.exit_code == EXIT_UNKNOWN


def test_a_test_suite_that_passes_ends_with_the_line(
    pytester: pytest.Pytester, small: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where workers of pytest-xdist run it, test_plugin.py sees it."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (pytester.path / "case.json").write_text(pretty_case(small))
    (pytester.path / "patch.json").write_bytes(msgspec.json.encode(UNKNOWN_KERNEL))
    pytester.makepyfile(
        """
        from pathlib import Path

        import pytest

        from eagletwin.harness.families.valid import read_case


        @pytest.mark.eagletwin(patches=["patch.json"])
        def test_a_case(eagletwin):
            eagletwin.check(read_case(Path(__file__).with_name("case.json")))
        """
    )
    result = forked.session(pytester.path, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*eagletwin: not checked by kernel.*Triton's interpreter ran it: _fwd_kernel*"])


# deterministic-window's candidate fix: the mask that it copies has the columns of the window, for each request of a batch.


# Of each request: the tokens that are verified, those before the window, and those in it before the first of these.
BATCHES = {
    "chains": ((3, 0, 2), (3, 5, 4), (3, 1, 4)),
    "one": ((4, 7, 3),),
    "of several widths": ((2, 3, 4), (5, 0, 0), (1, 9, 4), (3, 2, 4)),
    "of which no window begins behind 0": ((3, 0, 1), (3, 0, 3)),
    "padded": ((2, 4, 4), (2, 0, 1), (2, 0, 1)),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("more", [0, 50], ids=["as long as it is", "in a graph's buffer"])
def test_each_request_keeps_the_columns_of_its_window(batch: tuple[tuple[int, int, int], ...], more: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    masks = [torch.rand(width, first + rest + width, generator=drawn) < 0.5 for width, first, rest in batch]
    sizes = torch.tensor([0, *(mask.numel() for mask in masks)])
    whole = torch.cat([*(mask.flatten() for mask in masks), torch.ones(more, dtype=torch.bool)])
    widths, firsts, rests = (torch.tensor(of, dtype=torch.int32) for of in zip(*batch, strict=True))
    names = {
        "self": SimpleNamespace(forward_metadata=SimpleNamespace(custom_mask=whole, mask_indptr=sizes.cumsum(0))),
        "sliding_window_size": 4,
        "window_start_pos": firsts,
        "prefix_lens": rests,
        "extend_seq_lens": widths,
        "bs": len(batch),
        "torch": torch,
    }
    exec(_MASK_OF_WINDOW, names)
    custom, starts = names["custom"], names["starts"]
    assert isinstance(custom, torch.Tensor)
    assert isinstance(starts, torch.Tensor)
    assert custom.shape == whole.shape  # of a fixed size, whatever the lengths are
    assert starts.dtype == sizes.dtype
    for number, (mask, (width, first, rest)) in enumerate(zip(masks, batch, strict=True)):
        rows = custom[int(starts[number]) : int(starts[number + 1])]
        assert torch.equal(rows.view(width, rest + width), mask[:, first:])


# What the taps read out of KV pools, and what they poison again: alike in numpy and in torch, and nothing that is in use.


def pool(dtype: torch.dtype, layers: int = 2) -> SimpleNamespace:
    """9 slots, 2 heads of 3; the number of a key says where it is, and values are larger by 100."""
    keys = [torch.arange(54).reshape(9, 2, 3).to(dtype) + 64 * layer for layer in range(layers)]
    return SimpleNamespace(k_buffer=keys, v_buffer=[rows + 100 for rows in keys])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # numpy reads the one, torch the other
def test_rows_are_those_of_the_slots_in_their_order(dtype: torch.dtype) -> None:
    one = pool(dtype)
    rows = Pool(one).rows(np.array([7, 2, 7]))
    assert rows.shape == (3, 2, 2, 2, 3)
    for n, slot in enumerate((7, 2, 7)):
        for part, buffers in enumerate((one.k_buffer, one.v_buffer)):
            for layer in range(2):
                assert rows[n, part, layer].tolist() == buffers[layer][slot].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_freed_slots_are_poisoned_and_no_others(dtype: torch.dtype) -> None:
    one, before = pool(dtype), pool(dtype)
    Pool(one).poison(np.array([1, 4]), np.array([0, 2, 3]))
    for buffers, old, poison in ((one.k_buffer, before.k_buffer, KEY_POISON), (one.v_buffer, before.v_buffer, VALUE_POISON)):
        for rows, were in zip(buffers, old, strict=True):
            assert rows[[1, 4]].unique().tolist() == torch.tensor([poison]).to(dtype).tolist()
            assert torch.equal(rows[[0, 2, 3, 5, 6, 7, 8]], were[[0, 2, 3, 5, 6, 7, 8]])


def test_of_a_layer_with_slots_of_its_own_those_are_kept_to_which_used_ones_lead() -> None:
    """Free slot 1 leads to 5 as used slot 2 does: what it led to when it was last used."""
    inside, before = pool(torch.float32, 1), pool(torch.float32, 1)
    mapping = torch.tensor([0, 5, 5, 3, 0, 0, 0, 0, 0])
    hybrid = SimpleNamespace(layers_mapping={0: (0, True)}, swa_kv_pool=inside, full_to_swa_index_mapping=mapping)
    Pool(hybrid).poison(np.array([1]), np.array([0, 2, 3]))
    assert torch.equal(inside.k_buffer[0][[0, 3, 5]], before.k_buffer[0][[0, 3, 5]])
    assert inside.k_buffer[0][[1, 2, 4, 6, 7, 8]].unique().tolist() == [KEY_POISON]


def allocation(pages: torch.Tensor, page: int = 1) -> Allocation:
    """8 slots and the page that takes padding."""
    allocator = SimpleNamespace(get_all_free_pages=lambda: pages)
    return Allocation(
        SimpleNamespace(
            token_to_kv_pool_allocator=allocator,
            page_size=page,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, 8, dtype=torch.int32)),
            max_total_num_tokens=8,
        )
    )


def test_slots_up_to_the_highest_that_anybody_had_are_freed_ones() -> None:
    one = allocation(torch.tensor([1, 3, 4, 5, 6, 7, 8]))
    free = one.free()
    used = one.used(free)
    assert used.tolist() == [0, 2]
    assert one.freed_slots(free, used).tolist() == [1]
    one.note_slots(np.array([[5, 1]]))  # taken, written and given back between two looks
    assert one.freed_slots(free, used).tolist() == [1, 3, 4, 5]
    assert one.freed_slots(free, used).tolist() == [1, 3, 4, 5]  # and whenever it is written after that


def test_a_slot_from_outside_the_pool_is_not_poisoned() -> None:
    """It is the judge who says so: pool.accounting, draft.slots."""
    one = allocation(torch.tensor([1, 2, 12]))
    free = one.free()
    one.note_slots(np.array([12]))
    assert one.freed_slots(free, one.used(free)).tolist() == [1, 2]


# The tables of kernels in docs/explanation/states.md: each of these ran in the fast runtime, and no other one of layers that
# keep a state.


PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "states.md"
SHARED = "Which kernels run"
SECTIONS = {
    "qwen3-next-nextn": SHARED,
    "qwen3.5-nextn": "Qwen3.5 with its MTP layer",
    "nemotron-h-nextn": "Nemotron-H with its MTP layer",
}
OF_STATES = re.compile(r"ops\.(mamba|attention\.linear|attention\.fla|attention\.triton_gdn_fused_proj)\b")

# In the engine's process: launches are noted from the first prefill on, and written down whenever a request ends.
NOTE = """for req in reqs:
    import triton.runtime.interpreter as interpreter

    if not hasattr(interpreter, "noted"):
        interpreter.noted, interpreter.launch = set(), interpreter.InterpretedFunction.run

        def noting(self, *args, **kwargs):
            interpreter.noted.add(f"{self.fn.__module__} {self.fn.__name__}")
            return interpreter.launch(self, *args, **kwargs)

        interpreter.InterpretedFunction.run = noting"""
WRITE = """mamba_index = req.kv.mamba_pool_idx
import triton.runtime.interpreter as interpreter
with open({path!r}, "w") as file:
    file.write("\\n".join(sorted(interpreter.noted)))"""


def kernels_of(section: str) -> Iterator[str]:
    """Those of the first cells of the section's table."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    for row in text.partition("\n| kernel | ")[2].partition("\n\n")[0].split("\n| ")[1:]:
        yield from re.findall(r"`(\w+)`", row.partition("|")[0])


@pytest.mark.parametrize("model", spread(SECTIONS))
def test_the_table_is_what_ran_in_the_fast_runtime(run: Runner, states_case: Case, tmp_path: Path, model: str) -> None:
    settings = SGLangSettings(max_total_tokens=256, max_running_requests=2, radix_cache=True)
    case = msgspec.structs.replace(
        states_case, model=model, engine=msgspec.structs.replace(states_case.engine, sglang=settings), exercises=()
    )
    path = tmp_path / "launched"
    trace, verdict = run(
        case,
        Edit(target=f"{BATCH}.ScheduleBatch._collect_deferred_mamba_cow_and_clear", match="for req in reqs:", replacement=NOTE),
        Edit(
            target=f"{POOL}.free_mamba_cache",
            match="mamba_index = req.kv.mamba_pool_idx",
            replacement=WRITE.format(path=str(path)),
        ),
    )
    assert verdict.status == "equal", verdict
    assert trace.header.fallbacks == ()
    launched = dict(reversed(line.split()) for line in path.read_text().splitlines())
    own = set(kernels_of(SECTIONS[model]))
    assert own
    assert own <= set(launched)
    of_states = {kernel for kernel, module in launched.items() if OF_STATES.search(module)}
    assert of_states <= own | set(kernels_of(SHARED))
