"""What a search left out: features that users run and none of its cases had, each with the option that adds it."""

from collections.abc import Callable, Collection

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.mode import Mode
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.windows import ENDING


def _layers(case: Case) -> bool:
    return RECIPES[case.model].mtp_layers > 0


def _rejects(case: Case) -> bool:
    return case.engine.sglang.rejection_sampling


# Name, how it is searched, and whether a case has it.
TOPICS: tuple[tuple[str, str, Callable[[Case], bool]], ...] = (
    ("chains", "--topk 1", lambda case: case.topk == 1),
    ("trees", "--topk 4", lambda case: case.topk > 1),
    ("EAGLE-1/2", "--model llama-tiny", lambda case: RECIPES[case.model].algorithm == "EAGLE" and not _layers(case)),
    ("EAGLE-3", "--model llama-eagle3", lambda case: RECIPES[case.model].algorithm == "EAGLE3"),
    ("plain draft models", "--model llama-standalone", lambda case: not RECIPES[case.model].reads_states),
    ("multi-layer drafts", "--model llama-mtp, llama-mtp-chain, mimo-v2 or step-3.5", _layers),
    (
        "latent attention and experts",
        "--model deepseek-nextn",
        lambda case: RECIPES[case.model].target.latent is not None,
    ),
    (
        "Qwen3, its experts, and heads with further norms or layers",
        "--model qwen3-eagle3.1, qwen3-eagle3-norm, qwen3-eagle3-deep or qwen3-moe-eagle3",
        lambda case: RECIPES[case.model].family in ("qwen3", "qwen3_moe"),
    ),
    ("layers that keep a state", "--model qwen3-next-nextn", lambda case: RECIPES[case.model].target.delta is not None),
    (
        "windows that end",
        "--model gpt-oss-eagle3 --topk 1, mimo-v2-window or step-3.5-window",
        lambda case: 0 < RECIPES[case.model].window <= ENDING,
    ),
    ("requests that sample", "--sampling target", lambda case: case.samples and not _rejects(case)),
    ("rejection sampling", "--sampling rejection", _rejects),
    ("the end of a context", "--context-length 16", lambda case: case.engine.sglang.context_length > 0),
    (
        "trees with fewer nodes than their longest path",
        "--small-trees",
        lambda case: case.verify_nodes <= case.num_steps,
    ),
    ("updated weights", "--update-weights disk", lambda case: bool(case.engine.sglang.update_weights)),
    (
        "acceptance thresholds",
        "no option: write a case (docs/reference/case.md)",
        lambda case: min(case.engine.sglang.accept_single, case.engine.sglang.accept_acc) < 1,
    ),
    (
        "deterministic inference",
        "no option: write a case (docs/reference/case.md)",
        lambda case: case.engine.sglang.deterministic,
    ),
)


def topics_of(case: Case) -> tuple[str, ...]:
    """The names of the topics that a case has."""
    return tuple(name for name, _, has in TOPICS if has(case))


def not_looked_at(seen: Collection[str], mode: Mode) -> list[str]:
    """What neither the cases nor the mode had, each with the option for it."""
    missing = [f"{name} ({option})" for name, option, _ in TOPICS if name not in seen]
    missing += ["bfloat16, which users run (--dtype bfloat16)"] if mode.dtype == "float32" else []
    missing += ["tensor parallelism (--tp 2)"] if mode.tp == 1 else []
    if mode.device == "cpu":
        return [*missing, "CUDA kernels, CUDA graphs, the overlap scheduler of a GPU (--device cuda)"]
    missing += ["CUDA graphs (--graphs 1,2,4)"] if not mode.graphs else []
    return missing + ([] if mode.overlap else ["the overlap scheduler (--overlap)"])
