"""With rejection sampling the draft draws its tokens, and drew them for greedy requests too: found by eagletwin, partly live.

A greedy request is verified by its argmax: under `--speculative-use-rejection-sampling` SGLang stands for it by temperature 1
and top_k 1, so its draft was drawn at temperature 1, and any draft but the target's best is refused. Output stays right, and
acceptance is lost in every round. 0.5.21 gave the proposal the requests' top_k, but not everywhere that it draws:

* `greedy-drafts-decode`: draft decode and draft extend after verify, up to 0.5.20.
* `greedy-drafts-prefill`: the first draft after each prefill, live.
* `greedy-drafts-layers`: all drafts of multi-layer EAGLE, live.
* `greedy-drafts-layers-2`: the same where one CUDA graph holds all layers and draws inside, live.
"""

from ..entry import Case, Edit, Entry, Needs, OnCuda, Patch, Request, SGLangSettings, small_case, small_patch

_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
_LAYERS = "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker"
_TEMPERATURES, _TOP_KS = "forward_batch.sampling_info.temperatures,", "forward_batch.sampling_info.top_ks,"


def _case(model: str, prompts: tuple[tuple[int, ...], ...], num_steps: int, new: int, seed: int = 0) -> Case:
    """Greedy requests, whose drafts have no clear best: few coins would draw all of them."""
    return small_case(
        *(Request(id="abcd"[number], prompt=prompt, max_new_tokens=new) for number, prompt in enumerate(prompts)),
        model=model,
        num_steps=num_steps,
        sglang=SGLangSettings(rejection_sampling=True, random_seed=seed),
    )


# What 0.5.21 does for a greedy request under rejection sampling, for a case in which all are greedy: 0.5.17 hands the function
# that draws no top_k by which to know them.
_BEST = small_patch(
    "greedy-drafts-best",
    "sglang.srt.speculative.spec_utils.sample_draft_proposal",
    "fast_sample(probs, num_samples=1)",
    "probs.max(dim=-1, keepdim=True)",
)
_PREFILL = small_patch(
    "greedy-drafts-prefill",
    f"{_WORKER}._draft_extend_for_prefill",
    "return EagleDraftInput(",
    """if use_rejection_sampling:
    greedy = (batch.sampling_info.top_ks <= 1).view(-1, 1)
    topk_index = torch.where(greedy, probs.argmax(dim=-1, keepdim=True), topk_index)
    topk_p = probs.gather(1, topk_index)
return EagleDraftInput(""",
)

DECODE = Entry(
    id="greedy-drafts-decode",
    title="Draft the best token, and draw none, for a greedy request under rejection sampling",
    rule="draft.proposal",
    buggy="0.5.14 - 0.5.20",
    fixed="0.5.21",
    last_bad="0.5.20",
    trigger="--speculative-use-rejection-sampling, and a greedy request",
    revert=small_patch(
        "revert-greedy-drafts-decode",
        "sglang.srt.speculative.spec_utils.sample_draft_proposal",
        "if top_ks is not None:",
        "if False:",
    ),
    # two of these bugs are in one case there, so each is shown with the other fixed
    on_cuda=OnCuda(green=(_PREFILL, _BEST), red=(_PREFILL,), until="0.5.20", max_new_tokens=24),
    # with this seed the draft after the prefill is the best
    case=_case("llama-tiny", ((7, 19),), 2, 4, seed=3),
)

PREFILL = Entry(
    id="greedy-drafts-prefill",
    title="Draft the best token for a greedy request after a prefill as well",
    rule="draft.proposal",
    buggy="0.5.14 -",
    trigger="--speculative-use-rejection-sampling, and a greedy request",
    remedy=_PREFILL,
    on_cuda=OnCuda(green=(_PREFILL, _BEST), red=(_BEST,), until="0.5.20"),
    case=_case("llama-tiny", ((94,), (27,), (47,), (40,)), 1, 2),
)

# The same in the drafts after a prefill, and where one graph has all layers and draws inside.
_LAYERS_PREFILL = Edit(
    target=f"{_LAYERS}._draft_extend_for_prefill", match=_TEMPERATURES, replacement=f"{_TEMPERATURES}\n{_TOP_KS}"
)
_RUNNERS = "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner"
_ONE_GRAPH = (
    # which requests are greedy; padding is not
    Edit(
        target=f"{_RUNNERS}.OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner._init_and_capture",
        match="self.buffers = self._allocate_buffers()",
        replacement="""self.buffers = self._allocate_buffers()
if self.buffers.draft_probs is not None:
    self.buffers.greedy = torch.zeros_like(self.buffers.temperatures, dtype=torch.bool)""",
    ),
    Edit(
        target=f"{_RUNNERS}.MultiLayerEagleDraftExtendCudaGraphRunner._run_step_body",
        match="self._sample_draft_proposal(ret, bs)",
        replacement="""self._sample_draft_proposal(ret, bs)
probs = buffers.draft_probs[:bs, self.step]
ret.topk_index = torch.where(buffers.greedy[:bs], probs.argmax(dim=-1, keepdim=True), ret.topk_index)
ret.topk_p = probs.gather(1, ret.topk_index)""",
    ),
    Edit(
        target=f"{_RUNNERS}.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner.prepare",
        match="raw_bs = forward_batch.batch_size",
        replacement="""raw_bs = forward_batch.batch_size
if buffers.draft_probs is not None:
    buffers.greedy[:raw_bs].copy_((forward_batch.sampling_info.top_ks <= 1).view(-1, 1))""",
    ),
)
_LAYERS_IN_ONE_GRAPH = Patch(name="greedy-drafts-layers-in-one-graph", edits=(_LAYERS_PREFILL, *_ONE_GRAPH))
_LAYERS_BETWEEN_GRAPHS = Edit(  # the same between two replayed graphs, a layer each
    target=f"{_LAYERS}._draft_extend_for_decode",
    match=f"step_logits,\n                        {_TEMPERATURES}",
    replacement=f"step_logits,\n{_TEMPERATURES}\n{_TOP_KS}",
)

LAYERS = Entry(
    id="greedy-drafts-layers",
    title="Draft the best token for a greedy request in a multi-layer draft as well",
    rule="draft.proposal",
    buggy="0.5.16 -",
    trigger="multi-layer EAGLE, --speculative-use-rejection-sampling, and a greedy request",
    remedy=Patch(
        name="greedy-drafts-layers",
        edits=(
            _LAYERS_PREFILL,
            Edit(
                target=f"{_LAYERS}._draft_extend_for_decode",
                match=f"logits_sel,\n                    {_TEMPERATURES}",
                replacement=f"logits_sel,\n{_TEMPERATURES}\n{_TOP_KS}",
            ),
            _LAYERS_BETWEEN_GRAPHS,
        ),
        otherwise=(  # up to 0.5.22
            _LAYERS_PREFILL,
            Edit(
                target=f"{_LAYERS}._draft_extend_for_decode",
                match=f"logits_sel, {_TEMPERATURES.rstrip(',')}",
                replacement=f"logits_sel, {_TEMPERATURES} {_TOP_KS}",
            ),
            _LAYERS_BETWEEN_GRAPHS,
        ),
    ),
    on_cuda=OnCuda(green=(_BEST,), red=(), until="0.5.20", one_graph=_LAYERS_IN_ONE_GRAPH),
    case=_case("llama-mtp", ((12,), (85,), (65,)), 1, 2),
)

LAYERS_IN_ONE_GRAPH = Entry(
    id="greedy-drafts-layers-2",
    title="Draft the best token for a greedy request in the one graph of all layers as well",
    rule="draft.proposal",
    buggy="0.5.16 -",
    trigger="greedy-drafts-layers in the CUDA graphs of FlashAttention",
    needs=Needs(attention="fa3", graphs=True),
    remedy=Patch(name="greedy-drafts-layers-2", edits=_ONE_GRAPH),
    # with this seed the drafts after the prefill, of which the other entry is, are the best
    case=small_case(
        Request(id="a", prompt=(85,), max_new_tokens=4),
        model="llama-mtp",
        sglang=SGLangSettings(rejection_sampling=True, random_seed=6, graphs=(1,), attention_backend="fa3"),
    ),
)

ENTRIES = (DECODE, PREFILL, LAYERS, LAYERS_IN_ONE_GRAPH)
