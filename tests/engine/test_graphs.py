"""CUDA graphs on a CPU: what a tape records, replays and refuses, and what a search in graphs finds."""

import ast
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.core.case import Case, EngineSettings, Request, Sampling, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.inside.blame import CaptureError
from eagletwin.harness.engines.sglang.graphs import gates, streams, tape
from eagletwin.harness.families.dimensions.dimension import with_settings
from eagletwin.harness.judge.judge import judge

from ..lab.gpu.faults import HIDDEN, LAYERS, ONE_GRAPH_OF_LAYERS, SINGLE_HEAD, STATES_OF_NO_RUN, WAITS, batch_of
from ..rows import long, spread
from .eager_replays import BESIDE_PYTHON, DIFFERS

PRODUCTION: dict[str, Any] = {"graphs": (1, 2, 4), "overlap": True, "cuda_branches": True}


@pytest.fixture(autouse=True)
def no_pool() -> Iterator[None]:
    """Graphs of another test lie in no pool of this one's."""
    before = tape.Tape.pool_order[:]
    tape.Tape.pool_order.clear()
    yield
    tape.Tape.pool_order[:] = before


def captured(function: Callable[[], Any]) -> tuple[tape.Tape, Any]:
    graph = tape.Tape()
    with torch.inference_mode(), tape.graph(graph):
        result = function()
    return graph, result


def numbers(tensor: Tensor) -> list[Any]:
    with torch.inference_mode():
        return list(tensor.tolist())


def test_a_replay_computes_anew_on_the_memory_of_the_capture() -> None:
    given, stored, calls = torch.zeros(4), torch.zeros(6), []

    def step() -> tuple[Tensor, Tensor, Tensor]:
        calls.append(1)
        made = given * 2 + 1
        made.view(2, 2)[1].add_(10)  # through a view
        stored.index_put_((torch.arange(4),), made)
        filled = torch.empty(4).copy_(made)
        return made, torch.cat([filled, made.flip(0)]), torch.topk(filled, 2).indices

    graph, (made, joined, best) = captured(step)
    assert numbers(stored) == [0] * 6, "a capture runs nothing"
    assert all(number != number for number in numbers(made)), "and gives nothing"
    given.copy_(torch.arange(4.0))
    address = made.data_ptr()
    graph.replay()
    assert numbers(made) == [1, 3, 15, 17]
    assert made.data_ptr() == address
    assert numbers(joined) == [1, 3, 15, 17, 17, 15, 3, 1]
    assert numbers(best) == [3, 2]
    assert numbers(stored) == [1, 3, 15, 17, 0, 0]
    assert len(calls) == 1, "no Python runs again"


def test_what_python_holds_is_baked_in() -> None:
    held: dict[str, Any] = {"scale": 2.0, "tensor": torch.ones(2)}
    graph, result = captured(lambda: held["tensor"] * held["scale"])
    held |= {"scale": 100.0, "tensor": torch.full((2,), 5.0)}
    graph.replay()
    assert numbers(result) == [2, 2]


class Scaled(torch.nn.Module):
    """As a norm: one kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = torch.nn.Parameter(torch.ones(2)), 2.0
        self._calls: set[int] = set()

    @tape.fused
    def forward_native(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._calls.add(len(self._calls))
        return residual, x * self.weight * self.scale, (x + residual).add_(1)


def test_what_is_one_kernel_on_a_gpu_is_one_node_of_its_module_as_it_was() -> None:
    module, x, residual = Scaled(), torch.ones(2), torch.full((2,), 3.0)
    graph, (same, scaled, added) = captured(lambda: module.forward_native(x, residual))
    assert len(graph.nodes) == 1
    assert same is not scaled
    weight, module.weight, module.scale = module.weight, torch.nn.Parameter(torch.zeros(2)), 0.0
    with torch.inference_mode():
        weight.copy_(torch.tensor([5.0, 7.0]))
        x.fill_(2.0)
    graph.replay()
    assert (numbers(same), numbers(scaled), numbers(added)) == ([3, 3], [20, 28], [6, 6])
    assert numbers(module.forward_native(x, residual)[1]) == [0, 0], "outside of a capture it is Python"


def test_what_is_one_kernel_runs_once_for_its_numbers_and_shapes_while_graphs_are_captured() -> None:
    module, wide, residual = Scaled(), torch.ones(3, 2), torch.full((2,), 3.0)
    call, calls = module.forward_native, module._calls
    captured(lambda: call(torch.ones(2), residual))
    before = len(calls)
    again, ((same, scaled, added), (_, wider, _)) = captured(lambda: (call(wide[0], residual), call(wide, residual)))
    assert len(calls) == before + 1, "a wider one is known from nothing"
    again.replay()
    assert (numbers(same), numbers(scaled), numbers(added)) == ([3, 3], [2, 2], [5, 5])
    assert numbers(wider) == [[2, 2]] * 3
    module.scale = 5.0
    captured(lambda: call(wide[0], residual))
    assert len(calls) == before + 4, "two replays of nodes, and a call with another number"


class Overwriting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: set[int] = set()

    def forward_native(self, x: Tensor, residual: Tensor | None = None, post: Tensor | None = None) -> Any:
        self.calls.add(len(self.calls))
        return x * 2 if residual is None else (x * 2, x + residual + (0 if post is None else post))


def test_what_writes_over_its_arguments_on_a_gpu_does_so_in_a_graph_and_outside() -> None:
    class Both(Overwriting):
        forward_native = tape.fused(gates.write_over(Overwriting.forward_native, (0, 1)))

    module, given = Both(), [(torch.ones(2), torch.full((2,), 3.0)) for _ in range(3)]
    result = module.forward_native(*given[0])
    assert all(one is other for one, other in zip(result, given[0], strict=True))
    assert [numbers(one) for one in given[0]] == [[2, 2], [4, 4]]
    assert numbers(module.forward_native(given[0][0])) == [4, 4]
    assert numbers(given[0][0]) == [2, 2], "without a residual there is a new tensor"
    for x, residual in given[1:]:  # the second is known, and does not run
        graph, (same, _) = captured(lambda x=x, residual=residual: module.forward_native(x, residual))  # type: ignore[misc]
        assert (numbers(x), numbers(residual)) == ([1, 1], [3, 3]), "a capture runs nothing"
        assert same.data_ptr() == x.data_ptr()
        assert {one.data_ptr() for one in graph.nodes[0].written} == {x.data_ptr(), residual.data_ptr()}
        graph.replay()
        graph.replay()
        assert (numbers(x), numbers(residual)) == ([4, 4], [6, 6])
    assert len(module.calls) == 7
    _, residual = module.forward_native(given[0][0], given[0][1], torch.ones(2))
    assert residual is not given[0][1], "what is added in front makes a new residual"


def test_memory_that_nobody_wrote_is_poison() -> None:
    graph, (floats, integers) = captured(lambda: (torch.empty(2), torch.empty(2, dtype=torch.int64)))
    graph.replay()
    assert all(number != number for number in numbers(floats))
    assert numbers(integers) == [torch.iinfo(torch.int64).max // 3] * 2


def test_a_graph_may_write_over_what_a_later_one_of_the_pool_gave() -> None:
    given = torch.ones(2)
    first, one = captured(lambda: given + 1)
    second, two = captured(lambda: given + 2)
    first.replay()
    second.replay()
    assert (numbers(one), numbers(two)) == ([2, 2], [3, 3])
    first.replay()
    assert numbers(one) == [2, 2]
    assert all(number != number for number in numbers(two))


def test_a_kernel_is_launched_with_the_grid_and_the_buffers_of_the_capture() -> None:
    buffer, launched = torch.arange(6), []

    class Kernel:
        @staticmethod
        def run(*args: Any, grid: Any, warmup: bool) -> None:  # noqa: ARG004
            launched.append((grid, [numbers(one) if isinstance(one, Tensor) else one for one in args]))

    kernel = Kernel()
    graph, _ = captured(
        lambda: tape.launch(lambda kernel, *args, **how: kernel.run(*args, **how), kernel, (2,), (buffer[:2], 7), {}, ())
    )
    buffer.add_(10)
    graph.replay()
    assert launched[-1] == ((2,), [[10, 11, 12, 13, 14, 15], 7]), "a slice reaches to the end of its buffer"


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda one: one.sum().item(),
    "tolist": lambda one: one.tolist(),
    "bool": lambda one: 1 if one[0] else 0,
    "int": lambda one: int(one[0]),
    "cpu": lambda one: one.cpu(),
    "numpy": lambda one: one.numpy(),
    "equal": lambda one: torch.equal(one, one),
    "nonzero": torch.nonzero,
    "a boolean mask": lambda one: one[one > 1],
    "repeat_interleave": lambda one: torch.repeat_interleave(one, one.long()),
    "torch.tensor": lambda one: torch.tensor([1, 2]) + 1,
    "another capture": lambda one: captured(lambda: one + 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        captured(lambda: REFUSED[name](torch.arange(3.0)))
    assert not tape.capturing()


def test_a_tensor_of_the_host_is_read() -> None:
    offsets_cpu = torch.tensor([0, 3])
    graph, result = captured(lambda: torch.ones(5)[slice(*offsets_cpu.tolist())] + 1)
    graph.replay()
    assert numbers(result) == [2, 2, 2]


def test_a_masked_fill_is_none_of_it() -> None:
    given = torch.arange(4.0)
    graph, _ = captured(lambda: given.__setitem__(given > 1, 0.0))
    graph.replay()
    assert numbers(given) == [0, 1, 0, 0]


def test_an_error_of_a_replay_is_raised_at_the_line_that_was_captured() -> None:
    rows, index = torch.zeros(3), torch.zeros(1, dtype=torch.int64)
    source = "def look_up(rows, index):\n    return rows.index_select(0, index)\n"
    scope: dict[str, Any] = {}
    exec(compile(source, "/elsewhere/sglang/worker.py", "exec"), scope)
    graph, _ = captured(lambda: scope["look_up"](rows, index))
    index.fill_(7)
    with pytest.raises(IndexError) as raised:
        graph.replay()
    frame = raised.traceback[-1]
    assert (str(frame.path), frame.lineno + 1, frame.name) == ("/elsewhere/sglang/worker.py", 2, "look_up")


# How SGLang asks for the device: attributes and flags, and names that are compared.
_ASKS = {"is_cuda", "is_cuda_alike"}
_FLAGS = {"_is_cuda", "is_cuda"}
_DEVICES = {"cuda", "cpu"}


def gates_of(file: Path, name: str) -> Iterator[tuple[str, str]]:
    """(module, function) of each place where a file asks for the device."""

    def walk(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            own = (*inside, child.name) if named else inside  # type: ignore[union-attr]
            asks = isinstance(child, ast.Attribute) and child.attr in _ASKS
            flag = isinstance(child, ast.Name) and child.id in _FLAGS and isinstance(child.ctx, ast.Load)
            compared = isinstance(child, ast.Compare) and any(
                isinstance(one, ast.Constant) and one.value in _DEVICES for one in (child.left, *child.comparators)
            )
            if asks or flag or compared:
                yield name, ".".join(own)
            yield from walk(child, own)

    yield from walk(ast.parse(file.read_text()), ())


def test_each_gate_of_the_release_is_in_the_table() -> None:
    import sglang

    root = Path(sglang.__path__[0], "srt")
    patterns = (
        *("speculative/eagle_*.py", "speculative/multi_layer_eagle*.py", "speculative/frozen_kv*.py"),
        *("speculative/spec_utils.py", "managers/scheduler*.py", "managers/overlap_utils.py", "managers/schedule_batch.py"),
        *("managers/tp_worker.py", "mem_cache/allocation.py", "mem_cache/kv_index_translator.py", "mem_cache/memory_pool.py"),
        *("layers/attention/triton_backend.py", "model_executor/model_runner.py"),
        *("model_executor/cuda_graph_buffer_registry.py", "model_executor/runner*/*.py"),
        "model_executor/model_runner_components/cuda_graph_setup.py",
    )
    files = [file for pattern in patterns for file in root.glob(pattern)]
    found = {gate for file in files for gate in gates_of(file, ".".join(file.relative_to(root).with_suffix("").parts))}
    assert found == {*gates.GATES}


def test_each_runner_of_graphs_is_in_the_table() -> None:
    import sglang

    files = [file for room in ("speculative", "model_executor") for file in Path(sglang.__path__[0], "srt", room).rglob("*.py")]
    classes = (node.name for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef))
    assert {name for name in classes if name.endswith(("GraphRunner", "GraphBackend"))} == {*gates.RUNNERS}


_DRAFT = "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner"
_EXTEND = "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.execute"
_VERIFY = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward"
_COMMIT = "sglang.kernels.ops.speculative.eagle.prepare_verify_commit_outputs"
_METADATA = "self.draft_attn_backend.init_forward_metadata_out_graph("


def planted(name: str, target: str, match: str, replacement: str) -> Patch:
    return Patch(name=name, edits=(Edit(target=target, match=match, replacement=replacement),))


# A fault of graph code, or of a branch of CUDA, and the rules that may name it first
FAULTS: tuple[tuple[Patch, tuple[str, ...]], ...] = (
    (
        planted("slots-of-padding", f"{_DRAFT}.execute", "buffers.out_cache_loc.zero_()", "pass"),
        ("draft.scratch_kv", "target.kv"),
    ),
    (
        planted(
            "lengths-of-an-earlier-batch",
            f"{_DRAFT}.execute",
            "forward_batch.seq_lens,\n        forward_batch.out_cache_loc,",
            "buffers.seq_lens[:raw_bs],\nforward_batch.out_cache_loc,",
        ),
        ("draft.proposal", "draft.scratch_kv", "draft.hidden_in"),
    ),
    (
        planted("metadata-of-the-capture", f"{_DRAFT}.execute", _METADATA, "(lambda view: None)("),
        ("draft.scratch_kv", "draft.hidden_in", "draft.proposal"),
    ),
    (
        planted(
            "last-pair-of-a-grouped-copy", f"{_DRAFT}.execute", "(copy_dsts, copy_srcs)", "(copy_dsts[:-1], copy_srcs[:-1])"
        ),
        ("draft.proposal", "draft.scratch_kv", "draft.hidden_in"),
    ),
    (
        planted("a-smaller-graph", f"{_DRAFT}._postprocess_output_to_raw_bs", "t[:raw_bs]", "t.flip(0)[:raw_bs]"),
        ("draft.proposal", "tree.tokens"),
    ),
    (
        planted(
            "metadata-of-draft-extend",
            _EXTEND,
            "self.draft_extend_attn_backend.init_forward_metadata_out_graph(",
            "(lambda view: None)(",
        ),
        ("kernel.memory", "draft.kv", "draft.proposal"),
    ),
    (
        planted("rows-of-draft-extend", _EXTEND, "copy_srcs.append(select_index)", "copy_srcs.append(select_index - 1)"),
        ("draft.hidden_in", "draft.proposal"),
    ),
    (
        planted(
            "metadata-of-verify",
            f"{_VERIFY}._init_replay_attn_metadata_from_view",
            "attn_backend.init_forward_metadata_out_graph(fb_view)",
            "pass",
        ),
        ("kernel.memory", "target.kv", "target.hidden"),
    ),
    (
        planted(
            "width-of-the-fused-commit",
            _COMMIT,
            "DRAFT_WIDTH=num_draft_tokens,",
            "DRAFT_WIDTH=num_draft_tokens - (1 if bs > 1 and num_draft_tokens else 0),",
        ),
        ("draft.hidden_in", "draft.proposal"),
    ),
    (
        planted(
            "positions-that-a-fused-step-moves",
            _WORKER,
            "logits_output.next_token_logits,\n                        forward_batch.positions,",
            "logits_output.next_token_logits,\nforward_batch.positions.clone(),",
        ),
        ("engine.crash", "draft.positions"),
    ),
    (
        planted(
            "prepared-positions",
            "sglang.srt.speculative.eagle_worker_common.prepare_for_draft",
            "positions=prepared_positions,\n                mrope=",
            "positions=None,\nmrope=",
        ),
        ("engine.crash", "draft.positions"),
    ),
)


def in_production(case: Case, **settings: Any) -> Case:
    assert {*settings} <= {*SGLangSettings.__struct_fields__}
    return with_settings(case, **(PRODUCTION | settings))


def staggered() -> Case:
    """A batch that is padded while slots of a request that ended are another's."""
    requests = (
        Request(id="a", prompt=(7, 3, 9, 11, 5), max_new_tokens=14),
        Request(id="b", prompt=(4, 4, 2), max_new_tokens=12),
        Request(id="c", prompt=(9, 1, 1, 30, 31, 32, 2, 8, 60), max_new_tokens=16),
        Request(id="d", prompt=(20, 21, 22, 23), max_new_tokens=4),
        Request(id="e", prompt=(3, 5, 8), max_new_tokens=12, arrive=5),
    )
    settings = SGLangSettings(max_running_requests=4, max_total_tokens=128)
    return Case(name="staggered", model="llama-tiny", num_steps=3, requests=requests, engine=EngineSettings(sglang=settings))


def found_rules(host: Host, patch: Patch, model: str, topk: int, **settings: Any) -> list[str]:
    """The rules that batches show with a patch: padded, larger than any graph, of a graph's size, and one that shrinks and
    grows."""
    cases = [in_production(batch_of(size, model, topk), **settings) for size in (3, 5, 2)]
    for case in (*cases, in_production(staggered(), **{"overlap": False} | settings)):
        trial = Trials(host, RunSpec(patches=(patch,))).look_alone(case)
        if trial.verdict.rule:
            return [trial.verdict.rule]
    return []


@pytest.mark.parametrize(
    ("patch", "rules"), spread(FAULTS, lambda row: row[0].edits[0].target), ids=lambda value: getattr(value, "name", "")
)
def test_a_fault_of_graph_code_is_named(host: Host, patch: Patch, rules: tuple[str, ...]) -> None:
    found = found_rules(host, patch, "llama-tiny", 1)
    assert found
    assert found[0] in rules


def batch(model: str = "llama-tiny", **settings: Any) -> Case:
    return in_production(batch_of(3, model), **settings)


def sampling() -> Case:
    """One request is greedy, and the temperatures of two differ."""
    ways = (None, Sampling(temperature=2.0), Sampling(temperature=0.5))
    case = batch(rejection_sampling=True)
    return replace(case, requests=tuple(replace(one, sampling=way) for one, way in zip(case.requests, ways, strict=True)))


def arriving() -> Case:
    """The prefill of one, in a graph, is between two rounds of a batch that stays as it is."""
    a, b, *_ = staggered().requests
    late = Request(id="c", prompt=(9, 1, 1, 30, 31, 32, 2, 8, 60), max_new_tokens=8, arrive=4)
    case = replace(staggered(), requests=(*(replace(one, max_new_tokens=20) for one in (a, b)), late))
    return in_production(case, overlap=False, prefill_graphs=(16, 64))


_COMMON = "sglang.srt.speculative.eagle_worker_common"
_RELAY = "sglang.srt.managers.overlap_utils.FutureMap"
_KERNELS = "sglang.kernels.ops.speculative.eagle"
_PLAN = "self.draft_extend_attn_backend.init_forward_metadata_out_graph(fb_view)"
_PUBLISH = "        self._publish_read_done(in_graph=False)"
# A fault, the case that shows it, and the rule that names it
IN_CASES: tuple[tuple[Patch, Callable[[], Case], str], ...] = (
    (
        planted(
            "states-that-a-norm-writes-over",
            "sglang.srt.layers.aux_hidden_states.AuxHiddenStateList.capture",
            "hidden if owned else hidden.clone()",
            "hidden",
        ),
        lambda: batch("llama-eagle3"),
        "target.hidden",
    ),
    (
        planted("states-in-memory-of-a-graph", _EXTEND, "out.hidden_states[:raw_bs].clone()", "out.hidden_states[:raw_bs]"),
        arriving,
        "draft.hidden_in",
    ),
    (
        planted("slots-of-padding-of-draft-extend", _EXTEND, "buffers.out_cache_loc.zero_()", "buffers.out_cache_loc.fill_(1)"),
        batch,
        "draft.kv",
    ),
    (
        Patch(
            name="reads-that-are-done-before-they-begin",
            edits=(
                Edit(
                    target=_EXTEND,
                    match=_PLAN,
                    replacement=f"{_PUBLISH.strip()}\nearly = self.model_runner.shared_read_done_event\n{_PLAN}",
                ),
                Edit(
                    target=_EXTEND,
                    match=f"if shared_read_ends is SharedReadEnds.PRE_REPLAY:\n{_PUBLISH}",
                    replacement="self.model_runner.shared_read_done_event = early",
                ),
                Edit(
                    target=_EXTEND,
                    match=f"if shared_read_ends in (SharedReadEnds.IN_REPLAY, SharedReadEnds.POST_REPLAY):\n{_PUBLISH}",
                    replacement="pass",
                ),
            ),
        ),
        batch,
        "race.order",
    ),
    (
        planted(
            "padding-of-verify",
            "sglang.srt.model_executor.cuda_graph_buffer_registry.CudaGraphBufferRegistry.fill_from",
            "slot.reset_padding(raw_n, padded_n)",
            "pass",
        ),
        lambda: in_production(staggered(), overlap=False),
        "target.kv",
    ),
    (
        planted(
            "bonus-tokens-of-a-chain-tree",
            f"{_KERNELS}.build_chain_tree",
            "bonus_tokens.stride(0),",
            "0 * bonus_tokens.stride(0),",
        ),
        lambda: batch(attention_backend="fa3"),
        "verify.inputs",
    ),
    (
        planted(
            "steps-of-states",
            f"{_KERNELS}.prepare_verify_commit_outputs",
            "bonus, (last_steps, track_steps)",
            "bonus, ((last_steps - 1).clamp(min=0), track_steps)",
        ),
        lambda: batch("qwen3-next-nextn"),
        "target.state",
    ),
    (
        planted(
            "width-of-draft-extend",
            f"{_KERNELS}.prepare_draft_extend_layout",
            "seq_lens.stride(0),\n            num_draft_tokens,",
            "seq_lens.stride(0),\nnum_draft_tokens - (bs > 1),",
        ),
        batch,
        "draft.positions",
    ),
    (
        planted(
            "prepared-positions-of-another",
            f"{_COMMON}.prepare_for_draft",
            "prepared_positions\n        if prepared_positions is not None",
            "prepared_positions.roll(1)\nif prepared_positions is not None",
        ),
        batch,
        "draft.positions",
    ),
    (
        planted("relay-of-states", f"{_RELAY}.stash", "payload.hidden_states.to(", "payload.hidden_states.roll(1, 0).to("),
        batch,
        "draft.hidden_in",
    ),
    (
        planted(
            "relay-of-candidates", f"{_RELAY}.stash", "self.topk_index_buf[indices]", "self.topk_index_buf[indices.flip(0)]"
        ),
        batch,
        "draft.proposal",
    ),
    (
        planted("top-ks", f"{_DRAFT}.execute", "self.top_ks[:raw_bs].copy_(", "self.top_ks[:raw_bs].clone().copy_("),
        sampling,
        "draft.proposal",
    ),
    (
        planted("temperatures", f"{_DRAFT}.execute", "self.temperatures[:raw_bs].copy_(", "self.temperatures[:raw_bs].add("),
        sampling,
        "draft.proposal",
    ),
    (
        planted("draft-probs", f"{_DRAFT}.execute", "buffers.draft_probs[:raw_bs].copy_(", "buffers.draft_probs[:raw_bs].add("),
        sampling,
        "draft.proposal",
    ),
)


@pytest.mark.parametrize(
    ("patch", "case", "rule"), [*IN_CASES[:2], *long(*IN_CASES[2:])], ids=lambda value: getattr(value, "name", "")
)
def test_a_fault_is_named_in_its_case(host: Host, patch: Patch, case: Callable[[], Case], rule: str) -> None:
    assert Trials(host, RunSpec(patches=(patch,))).look_alone(case()).verdict.rule == rule


CATALOGUE = [("llama-tiny", topk, "triton", patch) for topk in (1, 3) for patch in SINGLE_HEAD]
CATALOGUE += [("llama-mtp-chain", 1, "triton", patch) for patch in (STATES_OF_NO_RUN, *LAYERS)]
CATALOGUE += [("llama-mtp-chain", 1, "fa3", patch) for patch in (*LAYERS, *ONE_GRAPH_OF_LAYERS)]


@pytest.mark.parametrize(
    ("model", "topk", "attention", "patch"),
    spread(CATALOGUE, lambda row: row[:3]),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_faults_that_a_gpu_was_needed_for_are_found_on_a_cpu(
    host: Host, model: str, topk: int, attention: str, patch: Patch
) -> None:
    assert found_rules(host, patch, model, topk, attention_backend=attention)


def test_greedy_requests_draft_the_best_token_inside_the_one_graph_of_all_layers(host: Host) -> None:
    entry = LEDGER["greedy-drafts-layers"]
    requests = tuple(replace(request, max_new_tokens=8) for request in entry.case.requests)
    case = in_production(replace(entry.case, num_steps=3, requests=requests, exercises=()), attention_backend="fa3")
    assert entry.remedy is not None
    assert entry.on_cuda.one_graph is not None
    patches = (entry.remedy, entry.on_cuda.one_graph)
    found = [Trials(host, RunSpec(patches=(patch,))).look_alone(case).verdict for patch in patches]
    assert [(one.status, one.rule) for one in found] == [("diverged", "draft.proposal"), ("equal", "")]


def test_latent_attention_in_prefill_graphs_takes_the_side_of_cuda(host: Host) -> None:
    """Off CUDA the runner restores the state of separate keys and values, by which FlashAttention's eager part would go."""
    requests = (
        Request(id="a", prompt=tuple(range(3, 25)), max_new_tokens=4),
        Request(id="b", prompt=(*range(3, 15), 40, 41, 42, 43, 44), max_new_tokens=4, arrive=6),
    )
    case = Case(name="latent", model="deepseek-nextn", num_steps=2, chunked_prefill_size=8, requests=requests)
    case = in_production(case, attention_backend="fa3", prefill_graphs=(16, 64))
    assert Trials(host, RunSpec()).look_alone(case).verdict.status == "equal"


NAMES = ("llama-tiny", "llama-eagle3", "llama-mtp-chain", "gemma-4-assistant", "deepseek-nextn", "qwen3-next-nextn")


@pytest.mark.parametrize("model", [NAMES[0], *long(*NAMES[1:])])
def test_numbers_are_those_of_a_run_without_graphs(host: Host, tmp_path: Path, model: str) -> None:
    case = batch_of(3, model)
    case = with_settings(replace(case, num_steps=min(case.num_steps, 2)), cuda_branches=True)
    traces = []
    for name, graphs in (("without", ()), ("with", (1, 2, 3))):  # of its own size: sums of as many rows
        (tmp_path / name).mkdir()
        own = with_settings(case, graphs=graphs)
        traces.append(host.engine(own).run(own, tmp_path / name))
    without, with_graphs = traces
    assert judge(with_graphs).unseen == {}
    assert with_graphs.header.records == without.header.records
    names = [(number, name) for number, record in enumerate(without.header.records) for name in record.tensors]
    assert all(torch.equal(with_graphs.tensor(*one), without.tensor(*one)) for one in names)


@pytest.mark.parametrize(("model", "topk"), [("llama-tiny", 1), ("llama-tiny", 3), *long(*((name, 1) for name in NAMES[1:]))])
def test_a_replay_leaves_what_its_python_leaves_bit_by_bit(host: Host, model: str, topk: int) -> None:
    trials = Trials(host, RunSpec(patches=(BESIDE_PYTHON,)))
    assert trials.look_alone(in_production(batch_of(3, model, topk))).header.ending.kind == "finished"


def test_a_replay_that_leaves_out_what_python_did_is_found(host: Host) -> None:
    short = planted("short-tape", f"{tape.__name__}.Tape.replay", "in self.nodes:", "in self.nodes[:-1]:")
    trial = Trials(host, RunSpec(patches=(BESIDE_PYTHON, short))).look_alone(in_production(batch_of(3, "llama-tiny")))
    assert DIFFERS in trial.header.ending.detail


def test_what_a_capture_cannot_do_ends_each_case_with_its_line(host: Host) -> None:
    patch = planted("waits", _WORKER, "needs_draft_probs = (", "int(topk_index.sum())\nneeds_draft_probs = (")
    trial = Trials(host, RunSpec(patches=(patch,))).look_alone(in_production(batch_of(2, "llama-tiny")))
    ending = trial.header.ending
    assert (trial.verdict.rule, ending.where) == ("engine.crash", "capture of CUDA graphs")
    assert "Tensor.__int__ (it waits for the device)" in ending.detail
    assert "draft_forward" in str(ending.origin)


def test_a_kernel_of_a_warm_up_that_reads_past_its_tensor_ends_each_case(host: Host) -> None:
    entry = LEDGER["adaptive-widths"]
    ending = Trials(host, RunSpec()).look_alone(entry.case).header.ending
    assert (ending.kind, ending.where) == ("crashed", "capture of CUDA graphs")
    assert "OutOfBounds: kernel '_copy_unified_indices_kernel'" in ending.detail


@pytest.mark.parametrize("patch", [*WAITS[:2], *long(*WAITS[2:])], ids=lambda patch: patch.name)
@pytest.mark.parametrize("graphs", [(1, 2, 4), *long(((),))])
def test_a_missing_wait_is_found_without_a_clock(host: Host, patch: Patch, graphs: tuple[int, ...]) -> None:
    trial = Trials(host, RunSpec(patches=(patch,))).look_alone(in_production(batch_of(3, "llama-tiny"), graphs=graphs))
    assert (trial.verdict.status, trial.verdict.rule) == ("diverged", "race.order")
    waits, for_whom = patch.name.split("-for-")
    first, second = {"process": "the host"}.get(waits, f"the {waits} stream"), {"lengths": "forward"}.get(for_whom, for_whom)
    assert f"{first} uses " in trial.header.ending.detail
    assert f"does not wait for the {second} stream" in trial.header.ending.detail


@pytest.mark.parametrize("rows", [0, 2])
def test_empty_tensors_share_no_memory(rows: int) -> None:
    writes, reads = streams.LogicalStream(), streams.LogicalStream()
    given = torch.zeros(rows)
    with pytest.raises(streams.Race) if rows else nullcontext(), streams.StreamWatch({}):
        with streams.StreamContext(writes):
            made = given * 2
            given.add_(1)
        with streams.StreamContext(reads):
            torch.empty(0).add_(1)
            torch.cat([made, given])
    streams.races.clear()


@pytest.mark.parametrize("patch", [None, *HIDDEN])
def test_what_is_ordered_is_no_race(host: Host, patch: Patch | None) -> None:
    trial = Trials(host, RunSpec(patches=(patch,) if patch else ())).look_alone(in_production(batch_of(3, "llama-tiny")))
    assert trial.verdict.rule == ""
