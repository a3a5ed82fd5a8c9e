"""PR #26997 (first as #26866, reverted by #26981): after verify the accepted path of a tree was left where it lay.

Draft extend, the next round and the scheduler all take the front of a request's block for the accepted path. Without the
move each of the three things that lie there is a rejected node's, and of a batch the bonus token was looked up with the
wrong stride. No release holds an intermediate state: up to 0.5.12.post1 this worker gets a tree only if
it is built by hand (`prove --releases` does), and then all parts are missing at once: the KV rows show first.

With DP attention draft extend counts the nodes of a tree, and not its longest path, of each request.

Not here: the pull request's `seq_lens_sum` of None, which matters under CUDA graphs alone.
"""

from dataclasses import replace

from ..entry import Case, Edit, Entry, Loses, Patch, Request, SGLangSettings, small_case

_COMMON = "sglang.srt.speculative.eagle_worker_common"
_BUGGY, _FIXED = "0.5.9 - 0.5.12.post1", "0.5.13"
# In 0.5.12.post1 a tree turns the overlap scheduler off, and with it the v2 worker.
_BY_HAND = Patch(
    name="by-hand-26997",
    switches=("trees-on-v2",),
    edits=(
        Edit(
            target="sglang.srt.server_args.ServerArgs._handle_speculative_decoding",
            match='spec_v1_reason = "spec v2 currently only supports topk = 1"',
            replacement="self.disable_overlap_schedule = False",
        ),
    ),
)
_PATH = "topk > 1 and an accepted path that is not the first nodes of the tree"


_RECORDED = {
    "kv": "the rows that move are not recorded",
    "hidden": "the states that move are not recorded",
    "bonus": "commit.path",
}
_STRIDE = Edit(target=f"{_COMMON}.run_eagle_verify", match="accept_index.shape[1],", replacement="num_draft_tokens,")
# On a GPU later releases look the bonus token up in one kernel with the rest of the commit, where the stride cannot be wrong.
_NOT_FUSED = Edit(
    target=f"{_COMMON}.run_eagle_verify",
    match="fused_commit_outputs = predict.is_cuda",
    replacement="fused_commit_outputs = False",
)


def _entry(part: str, title: str, edit: Edit, rule: str, case: Case, trigger: str = _PATH, later: Edit | None = None) -> Entry:
    """later: what must change as well in releases that have it."""
    return Entry(
        id=f"26997-{part}",
        title=title,
        rule=rule,
        buggy=_BUGGY,
        fixed=_FIXED,
        last_bad="0.5.12.post1",
        by_hand=_BY_HAND,
        trigger=trigger,
        loses=Loses("always", layers=False, tree=True) if part == "hidden" else None,
        revert=Patch(
            name=f"revert-26997-{part}",
            edits=(edit,) if later is None else (edit, later),
            otherwise=() if later is None else (edit,),
        ),
        recorded=_RECORDED.get(part, ""),
        case=case,
    )


# The second of the root's two children is accepted: node 2, whose place is node 1's.
_ONE = small_case(
    Request(id="a", prompt=(7,), max_new_tokens=4), topk=2, num_draft_tokens=3, exercises=("tree", "path_not_in_front")
)

KV = _entry(
    "kv",
    "Move the accepted path's KV rows to the front",
    Edit(
        target="sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache",
        match="token_to_kv_pool_allocator.get_kvcache().move_kv_cache(",
        replacement="(lambda *_: None)(",
    ),
    "commit.path",
    _ONE,
)
TOKENS = _entry(
    "tokens",
    "Move the accepted path's predicted tokens to the front",
    Edit(
        target=f"{_COMMON}._finalize_accept_tree_path",
        match="    predict = _compact_accept_to_front(",
        replacement="    _compact_accept_to_front(",
    ),
    "commit.path",
    _ONE,
)
HIDDEN = _entry(
    "hidden",
    "Move the accepted path's hidden states to the front",
    Edit(
        target=f"{_COMMON}._finalize_accept_tree_path",
        match="logits_output.hidden_states = _compact_accept_to_front(",
        replacement="_compact_accept_to_front(",
    ),
    "commit.path",
    _ONE,
)
BONUS = _entry(
    "bonus",
    "Look the bonus token up with the stride of the accepted path",
    _STRIDE,
    "verify.accept",
    small_case(
        Request(id="a", prompt=(17,), max_new_tokens=3),
        Request(id="b", prompt=(72,), max_new_tokens=3),
        num_steps=2,
        topk=2,
        num_draft_tokens=4,
        exercises=("tree", "batch"),
    ),
    "topk > 1, more nodes than num_steps + 1, and two requests in a batch",
    _NOT_FUSED,
)

_EXTEND = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode"
WIDTH = replace(
    _entry(
        "width",
        "Count the nodes of a tree in draft extend, where ranks tell each other how many tokens they have",
        Edit(
            target=_EXTEND,
            match="num_tokens_per_req=self.speculative_num_draft_tokens,",
            replacement="num_tokens_per_req=self.speculative_num_steps + 1,",
        ),
        "ranks.gathered",
        small_case(
            Request(id="a", prompt=(7,), max_new_tokens=4),
            Request(id="b", prompt=(9,), max_new_tokens=4, dp_rank=1),
            model="deepseek-nextn",
            topk=2,
            num_draft_tokens=3,
            sglang=SGLangSettings(attn_dp_size=2),
            exercises=("tree",),
        ),
        "DP attention, topk > 1, and more nodes than num_steps + 1",
    ),
    by_hand=None,
)

ENTRIES = (KV, TOKENS, HIDDEN, BONUS, WIDTH)
