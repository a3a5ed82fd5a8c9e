"""vLLM's bugs of chains: live ones of each model runner and of MTP layers, and public reports whose fixes are undone.

vllm-chunk-tail: at the end of a chunk that is not the last, V1 gives the drafter the last token that is known, and that is the
prompt's last: `num_tokens_no_spec` counts the whole prompt. Row K-1 of a chunk that ends at K must consume x[K]. It is SGLang's
26329. Each cut leaves one wrong row in the draft's KV for the life of the request. V2 has it right, and so has V1 with
`disable_padded_drafter_batch`.

vllm-58080 (issue #58080): in a step in which the drafts of one request would pass the drafter's max_model_len, V1 leaves out
the drafter's forward for the whole batch. Each request is given drafts of zeros, and its accepted tokens get no rows in the
draft's KV, for the life of the request. V2 clamps the positions of the long request alone, as V1's draft steps do, too.

vllm-33299 (issue #33299): MTP layers make the embedding zero where the position is 0. Token ids are shifted before, and row 0
consumes x[1], as in training (DeepSeek-V3, equation 21): a mask of x[0] has nothing to hide. One row of the draft's KV is wrong
for the life of each request. transformers' MtpLayer has no mask.

vllm-eagle-config: model runner V2 does not read the layers that an EAGLE-3 head names in `eagle_config`, and takes the default
ones: 2, half of the layers, all but 3. V1 reads them (issue #40551 is about heads that accept less on V2). Where as many
layers come of it, the head reads other states, without a message. The smallest target has four, of which the default names
two: there the drafter ends with shapes that do not fit.

vllm-top-p: the Triton kernel of a cut by top_p alone takes exp(logit - mean - 10 standard deviations). Where the largest logit
is 104 or more below that, each power is zero in float32 and each share is NaN, and the row is left uncut. Logits are divided by
the temperature before: a small one suffices. On a CUDA device batches of up to 64 rows have another kernel, which subtracts the
largest logit.

vllm-26498 (issue #26191, PR #26498): with the padded drafter batch, draft steps after the first attended to the rows of
rejected drafts, since `seq_lens` counted them.

vllm-14647 (issue #14647): the drafter's tokens were not shifted: row i consumed x[i], which the target's state of row i has
consumed already.

vllm-14649 (issue #14649): rows of accepted drafts kept what draft decode had written there, which comes from the draft's own
states, and not from the target's.

vllm-14464 (PR #14464): the head's state was handed on without the residual sum.

vllm-18909 (PR #18909): the EAGLE-3 head's ids were taken for ids of the target: `d2t` was not applied.
"""

from typing import Any

from eagletwin.harness.core.case import ModelRunner

from ..entry import Case, Edit, EngineSettings, Entry, Loses, Patch, Request, Sampling, VLLMSettings, small_case, small_patch

_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer"
_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_OLD: dict[str, Any] = {
    "engine": "vllm",
    "buggy": "before 0.32.0",
    "fixed": "0.32.0",
    "hidden": "0.32.0, the oldest vLLM that eagletwin runs, has the fix",
}


def _case(
    *requests: Request, runner: ModelRunner = "v1", max_model_len: int = 0, eagle_config: bool = False, **more: Any
) -> Case:
    """Of vLLM: blocks of its Triton attention have 16 rows and more."""
    own = VLLMSettings(model_runner=runner, max_model_len=max_model_len, eagle_config=eagle_config)
    settings = EngineSettings(vllm=own)
    usual: dict[str, Any] = {"page_size": 16, "engine": settings}
    return small_case(*requests, **(usual | more))


ENTRIES = (
    Entry(
        id="vllm-chunk-tail",
        engine="vllm",
        title="Model runner V1 drafts from the prompt's last token at the end of each chunk",
        rule="draft.input_ids",
        buggy="0.32.0 -",
        trigger="model runner V1, and a prompt in two chunks or more",
        loses=Loses("prompts longer than a chunk"),
        remedy=Patch(
            name="v1-next-token-of-a-chunk",
            edits=(
                Edit(
                    target=f"{_PROPOSER}.prepare_next_token_ids_padded",
                    match="discard_request_mask: torch.Tensor,\n",
                    replacement="discard_request_mask: torch.Tensor,\n    seq_lens_cpu: torch.Tensor | None = None,\n",
                ),
                Edit(
                    target=f"{_PROPOSER}.prepare_next_token_ids_padded",
                    match="gpu_input_batch.num_tokens_no_spec[i] - 1",
                    replacement=(
                        "gpu_input_batch.num_tokens_no_spec[i] - 1\n"
                        "if seq_lens_cpu is None\n"
                        "else min(gpu_input_batch.num_tokens_no_spec[i] - 1, int(seq_lens_cpu[i]))"
                    ),
                ),
                Edit(
                    target=f"{_RUNNER}.propose_draft_token_ids",
                    match=" " * 20 + "self.discard_request_mask.gpu,\n",
                    replacement=" " * 20 + "self.discard_request_mask.gpu,\n" + " " * 20 + "self.optimistic_seq_lens_cpu,\n",
                ),
            ),
        ),
        case=_case(
            Request(id="a", prompt=(7, 19, 3), max_new_tokens=2), chunked_prefill_size=1, exercises=("chunked_prefill",)
        ),
        also=(_case(Request(id="a", prompt=(7, 19, 3), max_new_tokens=2), chunked_prefill_size=1, model="llama-eagle3"),),
    ),
    Entry(
        id="vllm-33299",
        engine="vllm",
        title="MTP layers do not see the token of row 0",
        rule="draft.kv",
        buggy="0.32.0 -",
        trigger="MTP layers of MiMo, DeepSeek and seven other families",
        loses=Loses("always"),
        remedy=Patch(
            name="no-mask-of-row-0",
            edits=(
                Edit(
                    target="vllm.model_executor.models.mimo_mtp.MiMoMultiTokenPredictorLayer.forward",
                    match="inputs_embeds = torch.where(positions.unsqueeze(-1) == 0, 0, inputs_embeds)",
                    replacement="pass",
                ),
            ),
        ),
        case=_case(Request(id="a", prompt=(5, 9), max_new_tokens=2), runner="v2", model="mimo", num_steps=1),
    ),
    Entry(
        id="vllm-58080",
        engine="vllm",
        title="Model runner V1 leaves out the drafter for the whole batch when one request nears max_model_len",
        rule="draft.input_ids",
        buggy="0.32.0 -",
        trigger="model runner V1, and a batch with a request that nears the drafter's max_model_len",
        loses=Loses("batches"),
        remedy=small_patch(
            "v1-drafts-beside-a-long-request",
            f"{_RUNNER}._input_fits_in_drafter",
            "common_attn_metadata.max_seq_len + num_drafter_query_tokens",
            "common_attn_metadata.max_seq_len",
        ),
        case=_case(
            Request(id="a", prompt=(7, 19, 3), max_new_tokens=14),
            Request(id="b", prompt=tuple(n % 61 for n in range(53)), max_new_tokens=7),
            max_model_len=64,
            num_steps=3,
        ),
    ),
    Entry(
        id="vllm-eagle-config",
        engine="vllm",
        title="Model runner V2 ignores the layers that an EAGLE-3 head names in eagle_config",
        rule="engine.crash",
        buggy="0.32.0 -",
        trigger="model runner V2, and an EAGLE-3 head that names its layers in eagle_config alone",
        loses=Loses("always"),
        remedy=small_patch(
            "v2-layers-of-eagle-config",
            "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils.get_eagle3_aux_layers_from_config",
            'layer_ids = drafter_config.get("layer_ids")',
            """layer_ids = drafter_config.get(
    "eagle_aux_hidden_state_layer_ids"
) or drafter_config.get("layer_ids")""",
        ),
        case=_case(
            Request(id="a", prompt=(7, 19), max_new_tokens=2), runner="v2", eagle_config=True, model="llama-eagle3-full"
        ),
    ),
    Entry(
        id="vllm-top-p",
        engine="vllm",
        title="Rows whose logits spread widely are not cut by top_p",
        rule="verify.probabilities",
        buggy="0.32.0 -",
        trigger="top_p without top_k, a small temperature or widely spread logits, and on CUDA more than 64 rows of a batch",
        # the kernel cannot be edited in memory; docs/findings has the fix of it
        remedy=small_patch(
            "top-p-without-the-kernel",
            "vllm.v1.sample.ops.topk_topp_triton.apply_top_k_top_p_triton",
            "assert logits.ndim == 2",
            """if p is not None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    return apply_top_k_top_p_pytorch(logits, k, p)
assert logits.ndim == 2""",
        ),
        case=_case(
            Request(id="a", prompt=(7, 19), max_new_tokens=2, sampling=Sampling(temperature=0.1, top_p=0.5)), runner="v2"
        ),
    ),
    Entry(
        id="vllm-26498",
        title="Draft steps attend to rows of rejected drafts",
        rule="draft.proposal",
        trigger="a round with a rejected draft, and chains of two drafts or more",
        loses=Loses("always", num_steps=2),
        revert=small_patch(
            "revert-vllm-26498",
            f"{_PROPOSER}.propose",
            "common_attn_metadata.seq_lens -= num_rejected_tokens_gpu",
            "pass",
        ),
        case=_case(Request(id="a", prompt=(7, 19, 3), max_new_tokens=8), num_steps=2, exercises=("rejection",)),
        **_OLD,
    ),
    Entry(
        id="vllm-14647",
        title="The drafter's tokens are shifted by one",
        rule="draft.input_ids",
        trigger="any prompt",
        loses=Loses("always"),
        revert=Patch(
            name="revert-vllm-14647",
            edits=(
                Edit(
                    target=f"{_PROPOSER}.set_inputs_first_pass",
                    match="self.input_ids[: num_tokens - 1] = target_token_ids[1:]",
                    replacement="self.input_ids[:num_tokens] = target_token_ids",
                ),
                Edit(
                    target=f"{_PROPOSER}.set_inputs_first_pass",
                    match="self.input_ids[token_indices_to_sample] = next_token_ids",
                    replacement="pass",
                ),
            ),
        ),
        case=_case(Request(id="a", prompt=(7, 19), max_new_tokens=2)),
        **_OLD,
    ),
    Entry(
        id="vllm-14649",
        title="Rows of accepted drafts are written again, from the target's states",
        rule="draft.slots",
        trigger="a round that accepts a draft, and chains of two drafts or more",
        loses=Loses("always", num_steps=2),
        revert=small_patch(
            "revert-vllm-14649",
            f"{_PROPOSER}.propose",
            "slot_mapping_size, common_attn_metadata.slot_mapping\n",
            """slot_mapping_size,
common_attn_metadata.slot_mapping
if num_rejected_tokens_gpu is None
else torch.full_like(common_attn_metadata.slot_mapping, -1).index_copy(
    0,
    (rows := torch.cat((common_attn_metadata.query_start_loc[:-1], token_indices_to_sample)).long()),
    common_attn_metadata.slot_mapping[rows],
),
""",
        ),
        case=_case(Request(id="a", prompt=(7, 19, 3), max_new_tokens=8), num_steps=3, exercises=("accept_some",)),
        **_OLD,
    ),
    Entry(
        id="vllm-14464",
        title="The EAGLE head hands on its state with the residual sum",
        rule="draft.hidden_in",
        trigger="an EAGLE head",
        loses=Loses("always"),
        revert=small_patch(
            "revert-vllm-14464",
            "vllm.model_executor.models.llama_eagle.LlamaModel.forward",
            "hidden_states = hidden_states + residual",
            "pass",
        ),
        case=_case(Request(id="a", prompt=(7, 19), max_new_tokens=2), runner="v2"),
        **_OLD,
    ),
    Entry(
        id="vllm-18909",
        title="The ids of an EAGLE-3 head's own vocabulary are mapped to the target's",
        rule="draft.proposal",
        trigger="an EAGLE-3 head with a vocabulary of its own",
        loses=Loses("always"),
        revert=small_patch(
            "revert-vllm-18909",
            "vllm.model_executor.models.llama_eagle3.Eagle3LlamaForCausalLM.compute_logits",
            "targets = base + self.draft_id_to_target_id",
            "targets = base",
        ),
        case=_case(Request(id="a", prompt=(7, 19), max_new_tokens=2), runner="v2", model="llama-eagle3"),
        **_OLD,
    ),
)
