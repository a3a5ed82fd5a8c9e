"""What a recording says of its server and of its requests, read from SGLang's own objects."""

import os
import time
from hashlib import sha256
from typing import Any

import numpy as np
import psutil
import torch

from eagletwin.harness.core.recording import RecordedRequest
from eagletwin.harness.core.records import EngineInfo, ServedModel
from eagletwin.harness.core.run_spec import Dtype
from eagletwin.harness.engines.inside import own_loader
from eagletwin.harness.engines.protocol import RecordOptions

from ..compat.workers import Rank
from ..taps import speculation
from ..taps.speculation import Speculation
from .underway import Recording

# Of SGLang's server arguments, those by which it drafts, keeps its rows and makes its batches.
_ARGUMENTS = """
model_path speculative_draft_model_path speculative_algorithm speculative_num_steps speculative_eagle_topk
speculative_num_draft_tokens enable_multi_layer_eagle dtype quantization kv_cache_dtype attention_backend
speculative_attention_mode speculative_use_rejection_sampling page_size chunked_prefill_size disable_radix_cache
disable_overlap_schedule disable_cuda_graph tp_size dp_size
""".split()  # noqa: SIM905


def launch() -> str:
    """Which start of a server this process belongs to: when the process that started it began, and that one's number, which
    is 1 in each container."""
    launcher = psutil.Process(os.getppid())
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(launcher.create_time()))}-{launcher.pid}"


def arguments_of(scheduler: Any) -> dict[str, str]:
    return {name: str(getattr(scheduler.server_args, name)) for name in _ARGUMENTS if hasattr(scheduler.server_args, name)}


def engine_of(scheduler: Any, of: Speculation, rank: Rank) -> EngineInfo:
    import transformers
    import triton

    kind = str(next(of.target.model.parameters()).dtype).removeprefix("torch.")
    graphs = "graphs" if of.draft_graphs else "no graphs"
    dtype: Dtype = "bfloat16" if kind == "bfloat16" else "float32"
    return EngineInfo(
        name="sglang server",
        version=own_loader.version("sglang"),
        device=torch.device(str(scheduler.device)).type,
        kernels="its own",
        torch=str(torch.__version__),
        triton=str(triton.__version__),
        transformers=str(transformers.__version__),
        worker=type(of.worker).__name__,
        overlap=bool(scheduler.enable_overlap),
        tp=rank.tp_size,
        rank=rank.tp,
        mode=f"{kind}, {graphs}",
        dtype=dtype,
        parts=speculation.parts_of_worker(scheduler),
    )


def model_of(scheduler: Any, of: Speculation) -> ServedModel:
    return ServedModel(vocab_size=int(scheduler.model_config.vocab_size), mtp_layers=of.layers, states=of.states)


def request_of(recording: Recording, options: RecordOptions) -> RecordedRequest:
    """What the client asked for, with permuted ids if those are private."""
    request = recording.request
    rid = str(request.rid)
    sampling = request.sampling_params

    def permute(tokens: list[int]) -> tuple[int, ...]:
        return tuple(recording.permute(np.array(tokens, np.int64)).tolist())

    return RecordedRequest(
        id=recording.id,
        rid=sha256(f"{options.key}/rid/{rid}".encode()).hexdigest()[:32] if options.private else rid,
        prompt=permute([int(token) for token in request.origin_input_ids]),
        max_new_tokens=int(sampling.max_new_tokens),
        stop=permute(sorted(_ends(request))),
        sampled=int(sampling.top_k) != 1,
        altered=_has_altered_logits(request),
    )


# What changes a request's logits before a token is chosen, and the value at which it does not.
_PLAIN = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "watermark": None,
}


def _has_altered_logits(request: Any) -> bool:
    asked = any((getattr(request.sampling_params, name, plain) or plain) != plain for name, plain in _PLAIN.items())
    return asked or getattr(request, "custom_logit_processor", None) is not None


def _ends(request: Any) -> set[int]:
    """Tokens of which the first ends the request, as SGLang decides it (Req.check_finished)."""
    sampling, tokenizer = request.sampling_params, getattr(request, "tokenizer", None)
    if sampling.ignore_eos:
        return set()
    ends = {*(sampling.stop_token_ids or ()), *(getattr(request, "eos_token_ids", None) or ())}
    if tokenizer is not None:
        ends |= {tokenizer.eos_token_id, *(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
    return {int(token) for token in ends if token is not None}


def ended_otherwise(request: Any) -> tuple[bool, bool]:
    """Whether a finished request was aborted, and whether something else than its tokens' number or value ended it."""
    reason = type(request.finished_reason).__name__
    by_tokens = reason in ("FINISH_LENGTH", "FINISH_MATCHED_TOKEN") and not getattr(
        request.sampling_params, "min_new_tokens", 0
    )
    return reason == "FINISH_ABORT", not by_tokens
