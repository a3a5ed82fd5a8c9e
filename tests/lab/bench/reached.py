"""Which branches of SGLang's speculative workers the cases of a default search run, how soon, and which they never do.

What is drawn in one block of many comes with all its branches at once, so that a flat end says nothing of what is rarer.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from eagletwin.harness.engines.blocks import Block, blocks_of
from eagletwin.harness.engines.source import Source, init_file

from ..mutants.corpus import Known

_FOLDER = "sglang/srt/speculative"
FILES = (
    "eagle_worker_v2.py",
    "multi_layer_eagle_worker_v2.py",
    "eagle_worker_common.py",
    "eagle_utils.py",
    "eagle_info.py",
    "spec_utils.py",
)

# Why no case runs a branch, by its function and what leads into it. The first that fits counts.
REASONS = {
    "only a type checker": r"TYPE_CHECKING",
    "idle batches of data parallelism": r"idle|coordination|plan\.heterogeneous|was_empty|topk_index\) == 0"
    r"|numel\(\) == 0|pad_batch|spec_info is None",
    "sparse attention, DeepSeek-V4's backend": r"dsa|qsa|QSA|seed_from_extend|not layer_ids|draft_attn_backend, self"
    r"|c128|hisparse|can_run_decode_cuda_graph\)?$",
    "AMD, NPU, MUSA, MindSpore": r"_is_hip|_is_npu|mindspore|_is_musa|graph_capture\b",
    "CUDA alone, no stand-in (gates.py)": r"if _is_cuda$|_is_cuda and|index\.is_cuda|fused_lengths|QLEN_ONLY",
    "images": r"mm_input|mrope|Qwen3MoeForCausalLMMTP",
    "an environment variable, off by default": r"envs\.|simulate|SIMULATE|tree_topk != 1|target_predict|plan_stream"
    r"|rotates_in_graph|boundary_kv_ready|staged|widen|skipped_draft_extend",
    "several ranks": r"pp_size|world_size|_draft_worker is None|disable_cp|without_cp|is_verify_input",
    "an algorithm or option that no recipe has": r"uno|Uno|dflash|watermark|block_verification|extra_buffer_lazy|canary"
    r"|is_standalone|next_token_logits|replayssm|prepared_step_indices|native_window !=|track_indices"
    r"|return_logprob$",
    "a draft head with a file of its tokens, or a vocabulary of its own": r"token_map|MODELSCOPE|cached_repo|cache_dir"
    r"|hot_token|lm_head_from_target|vocab_size !=|shape\[-1\] !=",
    "layers of a draft that keep a state": r"deferred_mamba|_init_boundary_kv_fix_state",
    "attention that plans or masks in another way": r"mask_mode|attn_arg_prefill|with_topology|metadata_ready"
    r"|is_translating|prune|locs is None|draft_attn_backend is not None|seq_lens_cpu is not None",
    "drawn by a longer search": r"_draft_extend_for_decode: if (self\.cuda_graph_runner|self\.use_rejection|self\.chain_mtp)"
    r"|sampling_seed is not None",
    "a check of arguments, or a default, that the worker needs not": r"topk <= 1|hidden_states is not None$"
    r"|layer_ids is None|fast_sample|_done is not None|vocab_mask is None|current_token >= vocab_size|TIME_THRESHOLD",
    "called by nothing that a server does": r"\.draft_extend: $|from_host|from_linear_chain|weight_update_runners",
}


@dataclass(slots=True)
class ReachedCode:
    """branches: by file, all of them; ran: (file, line of a branch) -> how many cases ran it; grew: after so many cases, so
    many branches had been run, wherever that was more than before; cases: how many there were"""

    branches: dict[str, list[Block]]
    ran: Counter[tuple[str, int]] = field(default_factory=Counter)
    grew: list[tuple[int, int]] = field(default_factory=list)
    cases: int = 0

    def count(self, cases: Iterable[Known]) -> "ReachedCode":
        """Count what these cases ran."""
        own = {(file, one.line) for file, blocks in self.branches.items() for one in blocks}
        for known in cases:
            self.cases += 1
            before = len(self.ran)
            self.ran.update(own & {(Path(file).name, line) for file, lines in known.ran.items() for line in lines})
            if len(self.ran) > before:
                self.grew.append((self.cases, len(self.ran)))
        return self

    def never(self) -> list[str]:
        """A line for each branch that no case ran, with the reason; empty if none is known."""
        return [
            f"{file}:{one.line}\t{one.function}\t{one.branch}\t{reason_of(one)}"
            for file, blocks in self.branches.items()
            for one in blocks
            if (file, one.line) not in self.ran
        ]


def reason_of(branch: Block) -> str:
    """Why no case runs it; empty: not known."""
    text = f"{branch.function}: {'' if not branch.branch else branch.branch}"
    return next((reason for reason, pattern in REASONS.items() if re.search(pattern, text)), "")


def branches_of(source: Source) -> dict[str, list[Block]]:
    """By file, the branches of an SGLang's speculative workers. A release that lacks a file has none of it."""
    init = init_file(source)
    assert init is not None
    found = {}
    for name in FILES:
        path = init.parent.parent / _FOLDER / name
        if path.exists():
            found[name] = [block for block, _, _ in blocks_of(ast.parse(path.read_text(encoding="utf-8")))]
    return found


def lines_of(reached: ReachedCode) -> list[str]:
    """What is printed."""
    lines = [f"{'file':34}{'branches':>9}{'ran':>6}"]
    for file, blocks in reached.branches.items():
        lines.append(f"{file:34}{len(blocks):9}{sum((file, one.line) in reached.ran for one in blocks):6}")
    lines += ["", f"{reached.cases} cases ran {len(reached.ran)} of {sum(map(len, reached.branches.values()))} branches"]
    reasons = Counter(line.rpartition("\t")[2] or "not known" for line in reached.never())
    lines += [f"{count:6} of the others: {reason}" for reason, count in reasons.most_common()]
    lines += ["after so many cases, so many: " + ", ".join(f"{case}: {count}" for case, count in reached.grew)]
    return lines
