"""Every launch of a kernel in Triton's interpreter as well, in a small chain and a small tree of each recipe:
`python -m tests.families.shadowed [RECIPE…]`. A line a case: `finished` if no launch
differed, the verdict, and kernels that fell back to the interpreter."""

import sys
import tempfile
from pathlib import Path

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families import RECIPES
from eagletwin.harness.judge.judge import judge

PROMPT = (17, 72, 8, 32, 15, 63, 57, 60, 48, 26, 12, 62)
# SGLang keeps sinks in bfloat16, with which the interpreter does not compute. In float32 they are the same numbers.
SINKS = Patch(
    name="sinks-in-float32",
    edits=(
        Edit(
            target="sglang.srt.models.gpt_oss.GptOssAttention.__init__",
            match='torch.float32 if attn_backend == "trtllm_mha" else torch.bfloat16',
            replacement="torch.float32",
        ),
    ),
)


def small(model: str, topk: int) -> Case:
    """Chunks where no live bug is about them, a prefix hit where there is a cache, two rounds or more; a tree begins its
    branches inside a page."""
    cache = not RECIPES[model].target.states
    return Case(
        name=f"shadow-{topk}",
        model=model,
        num_steps=2,
        topk=topk,
        num_draft_tokens=0 if topk == 1 else 5,
        page_size=4 if cache else 1,
        chunked_prefill_size=512,
        chunks=() if RECIPES[model].mtp_layers else (8, 8),
        requests=(
            Request(id="a", prompt=PROMPT, max_new_tokens=6),
            Request(id="b", prompt=(*PROMPT[:9], 5), max_new_tokens=3, arrive=6),
        ),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=cache, max_total_tokens=256)),
    )


def mended(model: str, topk: int) -> tuple[Patch, ...]:
    """What a model needs to be run and compared."""
    window = LEDGER["tree-window"].remedy
    return () if model != "gpt-oss-eagle3" else (SINKS, window) if topk > 1 and window is not None else (SINKS,)


def main(models: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, Host() as host:
        for model in models or RECIPES:
            for topk in (1,) if RECIPES[model].mtp_layers else (1, 2):
                at = Path(folder, f"{model}-{topk}")
                at.mkdir()
                case = small(model, topk)
                trace = host.engine(case, mended(model, topk), "shadow").run(case, at)
                verdict, fell = judge(trace), ", ".join(trace.header.fallbacks) or "none"
                said = f"{verdict.status} {verdict.rule} {verdict.reason}".strip()
                print(f"{model}, topk {topk}: {trace.header.ending.kind}, {said}; fell back: {fell}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
