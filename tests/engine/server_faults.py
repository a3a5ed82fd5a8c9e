"""Faults for a server that is recorded, each planted where the CPU's way and the GPU's are still one; and what shows them.

Used by test_recording.py on a CPU, and by tests/gpu/recorded_faults.py on a GPU.
"""

from dataclasses import dataclass

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.patch import Edit, Patch

COMMON = "sglang.srt.speculative.eagle_worker_common"
WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
UTILS = "sglang.srt.speculative.eagle_utils"
ATTENTION = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"


MODEL = "llama-gqa"


@dataclass(frozen=True)
class Fault:
    """A fault, and by which rule integers alone show it; "": they do not.

    graphs   the same where draft decode and draft extend are replayed in CUDA graphs, which show nothing of their inside
    tree     whether the server drafts trees
    model    the recipe that is served: on llama-gqa a position more or less changes hardly a draft
    weights  of one that integers do not show: by which rule it shows where the checkpoints are at hand, and rows were recorded,
             or by which of two
    """

    patch: Patch
    rule: str
    graphs: str
    tree: bool = False
    weights: str = ""
    model: str = MODEL


def _undone(number: str) -> Patch:
    patch = LEDGER[number].revert
    assert patch is not None
    return patch


def _edit(name: str, target: str, match: str, replacement: str) -> Patch:
    return Patch(name=name, edits=(Edit(target=target, match=match, replacement=replacement),))


def _fault(name: str, target: str, match: str, replacement: str, rule: str, *, tree: bool = False) -> Fault:
    return Fault(_edit(name, target, match, replacement), rule, rule, tree)


def _hidden(name: str, target: str, match: str, replacement: str, weights: str, *, tree: bool = False) -> Fault:
    return Fault(_edit(name, target, match, replacement), "", "", tree, weights)


SHOWN = {
    "26329 undone: a chunk's tail consumes the prediction": Fault(_undone("26329"), "draft.input_ids", "draft.input_ids"),
    "33758 undone: a stop token behind the limit wins": Fault(_undone("33758"), "output.tokens", "output.tokens"),
    "26997-tokens undone: predicted tokens are not moved": Fault(
        _undone("26997-tokens"), "commit.path", "commit.path", tree=True
    ),
    "prefill rows of the draft are not shifted": _fault(
        "not-shifted",
        f"{WORKER}._draft_extend_for_prefill",
        "torch.cat((input_ids[1:], tail_tokens[i].reshape(1)))",
        "input_ids",
        "draft.input_ids",
    ),
    "draft extend consumes its neighbour's token": _fault(
        "extend-tokens",
        f"{COMMON}.prepare_for_draft_extend",
        "batch.extend_num_tokens = extend_num_tokens",
        "batch.input_ids = batch.input_ids.roll(1, 0)\nbatch.extend_num_tokens = extend_num_tokens",
        "draft.input_ids",
    ),
    "the nodes to verify stand one position late": _fault(
        "late-positions",
        f"{COMMON}.build_eagle_verify_input",
        "positions=position,",
        "positions=position + 1,",
        "tree.positions",
    ),
    "the target verifies its neighbour's nodes": _fault(
        "verify-tokens",
        f"{UTILS}.eagle_prepare_for_verify",
        "batch.input_ids = verify_input.draft_token",
        "batch.input_ids = verify_input.draft_token.roll(1, 0)",
        "verify.inputs",
    ),
    "nodes are written to their neighbours' slots": _fault(
        "verify-slots",
        f"{UTILS}.eagle_prepare_for_verify",
        "if batch.hisparse_coordinator is not None:",
        "batch.out_cache_loc = batch.out_cache_loc.roll(1, 0)\nif batch.hisparse_coordinator is not None:",
        "draft.slots",
        tree=True,  # a chain's slots come from the iteration's plan
    ),
    "one draft token too few is accepted": _fault(
        "accepts-fewer",
        f"{COMMON}.run_eagle_verify",
        "fused_commit_outputs = predict.is_cuda",
        "accept_lens = torch.clamp(accept_lens - 1, min=1)\nfused_commit_outputs = predict.is_cuda",
        "verify.accept",
    ),
    "half of the tokens are generated": _fault(
        "half",
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        "if len(self.output_ids) >= self.sampling_params.max_new_tokens:",
        "if len(self.output_ids) >= self.sampling_params.max_new_tokens // 2:",
        "output.tokens",
    ),
    "a sibling is lost from the tree's links": _fault(
        "lost-sibling",
        f"{COMMON}.build_eagle_verify_input",
        "retrieve_next_sibling=retrieve_next_sibling,",
        "retrieve_next_sibling=torch.full_like(retrieve_next_sibling, -1),",
        "tree.retrieve",
        tree=True,
    ),
    "freed slots are lost": _fault(
        "lost-slots",
        "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator.free",
        "self.free_pages = torch.cat((self.free_pages, free_index))",
        "return",
        "pool.accounting",
    ),
}
NOT_SHOWN = {
    "25015 undone: draft decode stands one position late": Fault(
        _undone("25015"), "draft.positions", "", weights="draft.proposal", model="llama-eagle3-full"
    ),
    "draft extend consumes the hidden states of the next row": _hidden(
        "hidden-states",
        f"{WORKER}._draft_extend_for_decode",
        "hidden_states=batch_result.logits_output.hidden_states,",
        "hidden_states=batch_result.logits_output.hidden_states.roll(1, 0),",
        "draft.kv",
    ),
    "keys and values of an accepted path are not moved": _hidden(
        "rows-stay",
        "sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache",
        "tgt_cache_loc, accept_out_cache_loc\n    )",
        "tgt_cache_loc[:0], accept_out_cache_loc[:0]\n    )",
        "draft.kv or verify.accept",  # whichever comes first in what was recorded: the target reads these rows, too
        tree=True,
    ),
    "the least likely token is drafted": _hidden(
        "worst-token",
        f"{WORKER}.draft_forward",
        "maybe_detect_nan(\n",
        "logits_output.next_token_logits.neg_()\nmaybe_detect_nan(\n",
        "draft.proposal",
    ),
    "draft decode consumes its input state again": _hidden(
        "state-again",
        f"{WORKER}.draft_forward",
        "hidden_states = logits_output.hidden_states",
        "hidden_states = hidden_states",
        "draft.proposal",
    ),
}
FAULTS = {**SHOWN, **NOT_SHOWN}
# The pool is looked at once a second, and SGLang's own check ends a server that is idle: a load of seconds is needed.
TAKES_SECONDS = "freed slots are lost"
