"""Live, found by eagletwin: what DP attention does wrong without CUDA graphs, with the Triton backend.

dp-idle-verify: a rank without requests ends when another one verifies.

An idle batch takes part in verify with verify's own input, and Triton plans it as decode: it asks that input for `kv_indptr`,
which a draft's input has. docs/findings/dp-idle-verify.

dp-draft-plan: a rank with fewer requests than another ends in its first step of draft decode.

Every step of the draft is planned before the first forward, which then pads the batch to that of the largest rank. The plan of
a draft is not made again (`forward_metadata_replan_equivalent` is off there), and attention has fewer rows of `kv_indptr` than
queries. Ranks of tensor parallelism pad as well, so the remedy decodes the planned rows of any padded step; verify of the same
batch is dp-padded-mask's. docs/findings/dp-draft-plan.

dp-padded-mask: verify of a rank with fewer requests than another reads past the end of its mask.

The batch is padded with requests of one token, for which a tree's mask has no entries. Layers that keep a state read past the
links of its nodes as well, on a rank without requests too. docs/findings/dp-padded-mask.

dp-layers-logits: a multi-layer draft takes the logits of most rows of draft extend from memory that nobody wrote.

Where ranks gather rows for the logits, draft extend computes those of all its rows and then selects one of each request. Its
input says that each request has one such row, so only the first rows of the batch are gathered. PR #26997 mended the same of
a single head. docs/findings/dp-layers-logits.

dp-input-logprobs: the draft reads and writes past its logits when a prompt is to have logprobs.

The rows that ranks gather for logits are counted once for target and draft, those of input logprobs among them. The draft has
one row of each request. On CUDA the copies to and from the gathered rows go by that count, in blocks of 8,192 numbers; those of
a CPU stop at the end of the tensor. docs/findings/dp-input-logprobs.
"""

from msgspec.structs import replace

from ..entry import Edit, Entry, Logprobs, Patch, Request, SGLangSettings, small_case, small_patch

_TRITON = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.init_forward_metadata"
_DECODE = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.forward_decode"

IDLE = small_patch(
    "idle-verify-without-a-plan",
    _TRITON,
    "if spec_info is None or spec_info.kv_indptr is None:",
    """# An idle batch may have verify's input, which lacks it.
if getattr(spec_info, "kv_indptr", None) is None:""",
)
PLAN = Patch(
    name="decode-of-planned-rows",
    edits=(
        Edit(
            target="sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch",
            match="if self.dp_spec_prefill_coordination_applied:",
            replacement="""from sglang.srt.layers.moe.utils import get_moe_a2a_backend

if (
    model_runner.is_draft_worker
    and not self.is_extend_in_batch
    and get_moe_a2a_backend().is_none()
):
    # A draft step is planned before this, for the rows that a rank has.
    dp_padding_mode = DpPaddingMode.SUM_LEN
if self.dp_spec_prefill_coordination_applied:""",
        ),
        Edit(
            target=_DECODE,
            match="if layer.k_scale is not None and layer.v_scale is not None:",
            replacement="""# A draft step is planned before DP attention pads it: rows of padding have
# no plan, and their output is dropped.
planned = kv_indptr.shape[0] - 1
o[planned:].zero_()
if layer.k_scale is not None and layer.v_scale is not None:""",
        ),
        Edit(
            target=_DECODE,
            match="q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),",
            replacement="q[:planned].view(-1, layer.tp_q_head_num, layer.qk_head_dim),",
        ),
        Edit(
            target=_DECODE,
            match="o.view(-1, layer.tp_q_head_num, layer.v_head_dim),",
            replacement="o[:planned].view(-1, layer.tp_q_head_num, layer.v_head_dim),",
        ),
    ),
)
MASK = Patch(
    name="trees-of-padding",
    edits=(
        Edit(
            target=_TRITON,
            match="custom_mask = spec_info.custom_mask",
            replacement="""custom_mask = spec_info.custom_mask
real = forward_batch._original_batch_size
if custom_mask is not None and real is not None and real < bs:
    # DP attention pads the batch with requests that have no mask.
    keys = self.get_cuda_graph_seq_len_fill_value() + num_tokens_per_req
    pad = (0, (bs - real) * num_tokens_per_req * keys)
    custom_mask = torch.nn.functional.pad(custom_mask, pad, value=True)""",
        ),
        Edit(
            target="sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase._forward_metadata",
            match="retrieve_parent_token = torch.empty_like(retrieve_next_token)",
            replacement="""pad = (0, 0, 0, bs - len(retrieve_next_token))
if pad[-1] > 0:
    # DP attention adds requests that have no tree.
    retrieve_next_token = torch.nn.functional.pad(
        retrieve_next_token, pad, value=-1
    )
    retrieve_next_sibling = torch.nn.functional.pad(
        retrieve_next_sibling, pad, value=-1
    )
retrieve_parent_token = torch.empty_like(retrieve_next_token)""",
        ),
    ),
)
LOGITS = small_patch(
    "logits-of-all-rows",
    "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker._draft_extend_for_decode",
    "num_tokens_for_logprob_per_req=1,",
    """# With gathered buffers every row has logits, since none are pruned below.
num_tokens_for_logprob_per_req=(
    self.speculative_num_steps + 1 + self.draft_extend_num_front_tokens
    if require_gathered_buffer()
    else 1
),""",
)
COPIES = small_patch(
    "copies-within-the-tensor",
    "sglang.kernels.ops.memory.memcpy_triton.memcpy_triton",
    "chunk_size = prod(src.shape[1:])",
    """chunk_size = prod(src.shape[1:])
# Counts of rows for logits are the target's; a draft has fewer.
sz = sz.clamp(max=(dst if offset_src else src).shape[0])""",
)
_SETTINGS = SGLangSettings(attn_dp_size=2)
# Two requests on rank 0 and one on rank 1, which is padded
_REQUEST = Request(id="a", prompt=(7,), max_new_tokens=3)
_UNEVEN = (_REQUEST, replace(_REQUEST, id="b"), replace(_REQUEST, id="c", dp_rank=1))

_PADDED_MASK = Entry(
    id="dp-padded-mask",
    title="Give the requests that DP attention adds to a batch a tree in verify",
    rule="kernel.memory",
    buggy="0.5.23 -",
    trigger="DP attention without CUDA graphs, Triton attention, and ranks with other numbers of requests",
    remedy=MASK,
    case=small_case(*_UNEVEN, model="qwen3.5-nextn", topk=2, sglang=_SETTINGS),
)

ENTRIES = (
    Entry(
        id="dp-idle-verify",
        title="Plan an idle batch that has the input of verify",
        rule="engine.crash",
        buggy="0.5.23 -",
        trigger="DP attention without CUDA graphs, Triton attention, and a rank without requests beside one that verifies",
        remedy=IDLE,
        case=small_case(Request(id="a", prompt=(7,), max_new_tokens=2), model="deepseek-nextn", sglang=_SETTINGS),
    ),
    Entry(
        id="dp-draft-plan",
        title="Decode only the rows of a draft step that its plan has",
        rule="engine.crash",
        buggy="0.5.23 -",
        trigger="DP attention without CUDA graphs, Triton attention, two draft steps or more, and ranks with other numbers of "
        "requests",
        remedy=PLAN,
        behind=_PADDED_MASK,
        case=small_case(*_UNEVEN, model="qwen3.5-nextn", num_steps=2, topk=2, sglang=_SETTINGS),
    ),
    _PADDED_MASK,
    Entry(
        id="dp-layers-logits",
        title="Gather all rows of a multi-layer draft's draft extend for their logits",
        rule="draft.proposal",
        buggy="0.5.23 -",
        trigger="DP attention without CUDA graphs, a multi-layer draft, and a round that accepts a draft",
        remedy=LOGITS,
        case=small_case(
            Request(id="a", prompt=(7,), max_new_tokens=5),
            Request(id="b", prompt=(7,), max_new_tokens=5, dp_rank=1),
            model="mimo-v2",
            sglang=_SETTINGS,
        ),
    ),
    Entry(
        id="dp-input-logprobs",
        title="Copy no more rows for the draft's logits than it has",
        rule="kernel.memory",
        buggy="0.5.23 -",
        trigger="CUDA, DP attention, and a request for the logprobs of its prompt",
        remedy=COPIES,
        case=small_case(
            Request(id="a", prompt=(7, 8, 9), max_new_tokens=1, logprobs=Logprobs(start=0)),
            model="deepseek-nextn",
            sglang=_SETTINGS,
        ),
    ),
)
