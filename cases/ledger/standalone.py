"""Live, found by eagletwin: STANDALONE runs a plain language model as if it were an EAGLE head.

An EAGLE head reads one token ahead of its position: row i consumes x[i+1] and the target's h[i], which knows x[0..i]. The
STANDALONE worker inherits that shift and hands on no hidden states. So its draft, a whole language model, is run on x[1..] at
positions 0..: it never sees the first token of a prompt, which models learn to lean on (`standalone-shift`).

The prefix cache is keyed for rows that end at their own token, single tokens, and not in pairs as EAGLE's is. A row that was
shifted has consumed the token behind it: the last row of a shared prefix is that of the request that was first
(`standalone-keys`, in the view `shifted`). With CUDA graphs the server ends where a batch grows and is cut in one iteration
(`standalone-states`). A plain model's own rows, x[i] at i, need no pairs: AS_TRAINED cures both.

AS_TRAINED is no one-line change. Extends consume their own tokens, and so cannot propose: the bonus token has no slot yet when
a prefill ends. Draft decode has: it begins with the bonus token in the slots of step 1, of which each branch has one, and
runs one forward more. It is written for the Triton backend without a CUDA graph of draft decode.

Neither says how a server `loses` by it: `acceptance` asks servers of EAGLE heads, and these would be named for them.
"""

from ..entry import Edit, Entry, Needs, OnCuda, Patch, Request, SGLangSettings, small_case, small_patch

_DRAFTER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
_STEPS = "sglang.srt.layers.attention.triton_backend.TritonMultiStepDraftBackend"

# Before the steps: a forward of the bonus token, on every branch alike. What it proposes are the root's children, the best:
# SGLang refuses to draw drafts of STANDALONE by chance. {batch}: what a release hands a forward context beside the backend.
_ROOT = """forward_batch.input_ids = spec_info.bonus_tokens.repeat_interleave(self.topk)
forward_batch.out_cache_loc = out_cache_loc[0]
with forward_context(
    ForwardContext(attn_backend=self.draft_attn_backend.attn_backends[0]){batch}
):
    root = self.draft_runner.forward(forward_batch).logits_output.next_token_logits[:: self.topk]
probs = renorm_draft_probs(root, forward_batch.sampling_info, False)
topk_p, topk_index = fast_topk(probs, self.topk, dim=-1)
forward_batch.positions.add_(1)
"""

# Draft extend consumes the old bonus token and the accepted drafts, where it has the tokens that verify committed.
_OWN_TOKENS = """width = self.speculative_num_draft_tokens
bonus = batch.spec_info.draft_token.view(-1, width)[:, :1]
next_token_ids = torch.cat([bonus, next_token_ids.view(-1, width)[:, :-1]], dim=1).flatten()"""


def _edits_for_unshifted_inputs(batch: str, own: tuple[str, str], step: tuple[str, str]) -> tuple[Edit, ...]:
    """batch: of _ROOT. own: where draft extend is given its tokens, and how. step: the backend of step i, and of the next."""
    return (
        Edit(
            target=f"{_DRAFTER}._draft_extend_for_prefill",
            match="torch.cat((input_ids[1:], tail_tokens[i].reshape(1)))",
            replacement="input_ids",
        ),
        Edit(target=f"{_DRAFTER}._draft_extend_for_decode", match=own[0], replacement=own[1]),
        # no graph has a place for the bonus token
        Edit(target=f"{_DRAFTER}._capture_cuda_graphs", match="if _is_cpu or", replacement="if True or _is_cpu or"),
        Edit(target=f"{_DRAFTER}.draft", match="self.speculative_num_steps > 1", replacement="self.speculative_num_steps > 0"),
        Edit(
            target=f"{_DRAFTER}.draft_forward",
            match="topk1_chain_fits = (",
            replacement=f"{_ROOT.format(batch=batch)}topk1_chain_fits = (",
        ),
        Edit(target=f"{_DRAFTER}.draft_forward", match="out_cache_loc[i]", replacement="out_cache_loc[i + 1]"),
        Edit(target=f"{_DRAFTER}.draft_forward", match=step[0], replacement=step[1]),
        Edit(
            target="sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend",
            match="self.speculative_num_steps <= 1",
            replacement="self.speculative_num_steps <= 0",
        ),
        Edit(
            target=f"{_STEPS}.__init__",
            match="range(self.speculative_num_steps - 1)",
            replacement="range(self.speculative_num_steps)",
        ),
        Edit(
            target=f"{_STEPS}.common_template",
            match="range(self.speculative_num_steps - 1)",
            replacement="range(self.speculative_num_steps)",
        ),
    )


_BACKEND = "attn_backend=self.draft_attn_backend.attn_backends[i{}]"
_WITH_BATCH = f"{_BACKEND}\n                    ),\n                    forward_batch=forward_batch,"
_COMMITTED = "next_token_ids = batch_result.next_token_ids.to(torch.int64)"
AS_TRAINED = Patch(
    name="standalone-as-trained",
    edits=_edits_for_unshifted_inputs(
        ", forward_batch=forward_batch",
        ("# Batch 2: Draft extend", _OWN_TOKENS),
        (_WITH_BATCH.format(""), _WITH_BATCH.format(" + 1")),
    ),
    # 0.5.17 to 0.5.22, on a CPU: a forward context takes no batch, and up to 0.5.21 the tokens come later
    otherwise=_edits_for_unshifted_inputs(
        "", (_COMMITTED, f"{_COMMITTED}\n{_OWN_TOKENS}"), (_BACKEND.format(""), _BACKEND.format(" + 1"))
    ),
)

KEYS = small_patch(
    "standalone-keys-in-pairs",
    "sglang.srt.mem_cache.kv_cache_builder.build_kv_cache",
    "is_eagle=spec_algorithm.is_eagle(),",
    """# Rows of the draft consume the token after their own. STANDALONE's worker
# inherits that from EAGLE's.
is_eagle=spec_algorithm.is_eagle() or spec_algorithm.is_standalone(),""",
)

SHIFT = Entry(
    id="standalone-shift",
    title="Run a plain draft model on x[i] at position i",
    rule="draft.input_ids",
    buggy="0.5.9 -",
    trigger="STANDALONE, and a draft that leans on the first token",
    remedy=AS_TRAINED,
    accepted="shifted",
    on_cuda=OnCuda(triton_alone="its candidate fix gives the Triton backend one step more, and no other"),
    case=small_case(Request(id="a", prompt=(7,), max_new_tokens=2), model="llama-standalone"),
)

PAIRS = Entry(
    id="standalone-keys",
    title="Key the prefix cache of STANDALONE in pairs, as long as its rows are shifted",
    rule="draft.kv",
    buggy="0.5.9 -",
    trigger="STANDALONE with the prefix cache, and two prompts that part inside it",
    remedy=KEYS,
    within="shifted",
    case=small_case(
        Request(id="a", prompt=(7, 19, 3), max_new_tokens=1),
        Request(id="b", prompt=(7, 19, 5), max_new_tokens=2, arrive=4),
        model="llama-standalone",
        exercises=("radix_hit",),
        sglang=SGLangSettings(radix_cache=True),
    ),
)

_LONG = (
    21, 53, 88, 53, 81, 36, 61, 27, 60, 65, 23, 64, 67, 30, 0, 1, 47, 74, 7, 11, 10, 46, 21, 94, 85, 39, 32, 77, 27, 77,
    4, 74, 87, 20, 55, 13, 30, 36,
)  # fmt: skip

STATES = Entry(
    id="standalone-states",
    title="Leave states that a plain draft does not read out of a batch that grows",
    rule="engine.crash",
    buggy="0.5.12 -",
    trigger="STANDALONE with CUDA graphs, no overlap, and a retraction in the iteration in which a batch grows",
    needs=Needs(graphs=True, overlap=False),
    within="shifted",
    remedy=small_patch(
        "states-of-all-or-none",
        "sglang.srt.speculative.eagle_info.EagleDraftInput.merge_batch",
        "if self.hidden_states is not None and spec_info.hidden_states is not None:",
        "if self.hidden_states is None or spec_info.hidden_states is None:\n    self.hidden_states = None\nelse:",
    ),
    case=small_case(
        Request(id="a", prompt=(0, 1, 47, 74, 54, 8, 18, 29, 29), max_new_tokens=5),
        Request(id="c", prompt=(35, 70, 0, 22, 7, 53, 35, 46, 4, 40, 21, 50, 39, 53, 2, 69), max_new_tokens=8),
        Request(id="d", prompt=_LONG, max_new_tokens=5, arrive=2),
        Request(id="e", prompt=(5, 16, 27, 38, 49, 60, 71, 82, 93), max_new_tokens=6, arrive=5),
        model="llama-standalone",
        num_steps=2,
        topk=3,
        num_draft_tokens=10,
        exercises=("tree", "retraction"),
        sglang=SGLangSettings(max_total_tokens=128, graphs=(1, 2, 4)),
    ),
)

ENTRIES = (SHIFT, PAIRS, STATES)
