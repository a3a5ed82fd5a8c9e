"""Each replay of a tape against the Python that was captured, run anew on the same memory: all that either leaves is compared.

The engine's process imports it, by the edits of `BESIDE_PYTHON`. Prefill graphs have another backend: they are not compared.
"""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.inside.blame import own_code
from eagletwin.harness.engines.sglang.graphs import install, tape

_BACKEND = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend"
_ROOT = str(Path(__file__).parents[2])
_HERE = f"(__import__('sys').path.append({_ROOT!r}), __import__('importlib').import_module({__name__!r}))[1]"
DIFFERS = "a replay and its Python differ"
BESIDE_PYTHON = Patch(
    name="each replay beside Python",
    switches=("record-nothing",),  # taps would see each forward twice
    edits=(
        Edit(
            target=f"{_BACKEND}.capture_one",
            match="self._graphs[shape_key] = graph",
            replacement=f"self._graphs[shape_key] = {_HERE}.keep_python(graph, forward_fn)",
        ),
        Edit(
            target=f"{_BACKEND}.replay",
            match="self._graphs[shape_key].replay()",
            replacement=f"{_HERE}.replay(self._graphs[shape_key], self._outputs[shape_key])",
        ),
    ),
)


def keep_python(graph: Any, forward: Any) -> Any:
    """The graph, with all that its Python needs to run again: the context, and what attention's backends and its batch hold."""
    from sglang.srt.model_executor.forward_context import get_forward_context

    context = get_forward_context()
    held: dict[int, tuple[Any, dict[str, Any]]] = {}
    _collect(context.attn_backend, held)
    closed_over = [cell.cell_contents for cell in forward.__closure__]
    kept = [
        one
        for batch in closed_over
        if type(batch).__name__ == "ForwardBatch"
        for one in (batch, batch.spec_info, batch.sampling_info)
    ]
    managers = [getattr(getattr(one, "model_runner", None), "lora_manager", None) for one in closed_over]
    kept += [one for manager in filter(None, managers) for one in (manager.lora_backend, manager.lora_backend.batch_info)]
    held |= {id(one): (one, dict(vars(one))) for one in kept if one is not None}
    graph.again = SimpleNamespace(forward=forward, context=context, held=[*held.values()])
    return graph


def _collect(backend: Any, held: dict[int, tuple[Any, dict[str, Any]]]) -> None:
    if id(backend) in held:
        return
    held[id(backend)] = backend, dict(vars(backend))
    for value in vars(backend).values():
        for one in value if isinstance(value, list | tuple) else (value,):
            if type(one).__name__.endswith("Backend"):
                _collect(one, held)


def replay(graph: tape.Tape, outputs: Any) -> None:
    """Replay it; raise AssertionError if its Python leaves another bit anywhere."""
    with torch.inference_mode():
        memory = [
            torch.empty(0, dtype=torch.uint8).set_(written.untyped_storage())
            for written in graph._accesses[1]
            if written.untyped_storage().nbytes() and written.untyped_storage().data_ptr() not in graph._own
        ]
        before, random = [one.clone() for one in memory], torch.get_rng_state()
        graph.replay()
        replayed = [one.clone() for one in memory], [one.clone() for one in tape.tensors(_plain(outputs))]
        for one, old in zip(memory, before, strict=True):
            one.copy_(old)
        torch.set_rng_state(random)  # both draw as often
        eager = _run_again(graph.again)  # type: ignore[attr-defined]
        again = [one.clone() for one in memory], [one.clone() for one in tape.tensors(_plain(eager))]
        for one, new in zip(memory, replayed[0], strict=True):
            one.copy_(new)
    assert len(replayed[1]) == len(again[1])
    pairs = enumerate(zip(replayed[0] + replayed[1], again[0] + again[1], strict=True))
    different = [n for n, (one, other) in pairs if one.numpy().tobytes() != other.numpy().tobytes()]
    assert not different, f"{DIFFERS} in {different} of {len(memory)} memories and {len(again[1])} outputs"


def _run_again(again: Any) -> Any:
    from sglang.srt.model_executor.forward_context import forward_context
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

    now = [(backend, dict(vars(backend))) for backend, _ in again.held]
    listener, install.listener = install.listener, None
    try:
        with ExitStack() as stack:
            for context in (
                forward_context(again.context),
                model_capture_mode(),
                install._launches_on_tapes(),
                own_code(),
                _Poisoned(),
            ):
                stack.enter_context(context)
            for backend, fields in again.held:
                vars(backend).update(fields)
            return again.forward()
    finally:
        install.listener = listener
        for backend, fields in now:
            vars(backend).clear()
            vars(backend).update(fields)


class _Poisoned(tape.DispatchMode):
    """Memory of torch.empty is poisoned, as it is before a replay."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function._schema.name.removeprefix("aten::") in tape._EMPTY:
            tape.poison(tuple(tape.tensors(result)))
        return result


def _plain(output: Any) -> Any:
    """Lists and tuples of what a forward gives."""
    if isinstance(output, torch.Tensor) or output is None:
        return output
    if isinstance(output, list | tuple):
        return [_plain(part) for part in output]
    if isinstance(output, dict):
        return [_plain(part) for part in output.values()]
    return [part for part in vars(output).values() if isinstance(part, torch.Tensor)] if hasattr(output, "__dict__") else None
