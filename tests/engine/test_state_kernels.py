"""The tables of kernels in docs/explanation/states.md: each of these ran in the fast runtime, and no other one of layers
that keep a state."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, SGLangSettings
from eagletwin.harness.core.patch import Edit

from ..rows import spread
from .conftest import Runner
from .test_states import BATCH, POOL

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
    """Those of the rows that say so."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    for row in re.findall(r"^\|(.*\| the fast runtime \|.*)$", text, re.MULTILINE):
        yield from re.findall(r"`(\w+)`", row.partition("|")[0])


@pytest.mark.parametrize("model", spread(SECTIONS))
def test_the_table_is_what_ran_in_the_fast_runtime(run: Runner, states_case: Case, tmp_path: Path, model: str) -> None:
    settings = SGLangSettings(max_total_tokens=256, max_running_requests=2, radix_cache=True)
    case = replace(states_case, model=model, engine=replace(states_case.engine, sglang=settings), exercises=())
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
