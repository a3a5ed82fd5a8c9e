"""A request as SGLang's tokenizer process would send it: a dataclass up to 0.5.14, a msgspec struct after; token ids are arrays
from 0.5.13 on, and lists before.
"""

import dataclasses
from array import array
from typing import Any

from eagletwin.harness.core.case import Adapter, Request, biases, processor_bias
from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.families.dimensions import DIMENSIONS

from ..stand_ins.stubs import Ends


def _takes_arrays(message: Any) -> bool:
    # as text, since 0.5.13 writes `array[int]`, which Python 3.11 cannot evaluate
    return "array" in str(message.__annotations__["input_ids"])


def tokenized_request(request: Request, vocabulary: int) -> Any:
    """The message that hands this request to the scheduler, of a model with so many tokens. Raises NotDriven for what the
    request asks for and this release's message has no field for."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    own = request.sampling
    how: dict[str, Any] = {"temperature": 0.0}
    if own is not None:
        how = {name: getattr(own, name) for name in ("temperature", "top_p", "min_p")}
        how |= {"top_k": own.top_k or -1, "sampling_seed": own.seed}
    if (penalties := request.penalties) is not None:
        how |= {f"{name}_penalty": getattr(penalties, name) for name in penalties.__struct_fields__}
    processor = None
    if request.processor is not None:
        from ..logit_processor import Adds

        processor, how["custom_params"] = Adds.to_str(), {"added": processor_bias(request.processor, vocabulary)}
    if request.grammar is not None:
        from ..grammars import parameters

        how |= parameters(request.grammar)
    if request.logit_bias:
        how["logit_bias"] = {str(token): value for token, value in biases(request).items()}
    sampling = SamplingParams(
        **how,
        max_new_tokens=request.max_new_tokens,
        min_new_tokens=request.min_new_tokens,
        stop_token_ids=list(request.stop) or None,
        ignore_eos=not request.stop,
    )
    sampling.normalize(Ends() if request.min_new_tokens else None)
    values: dict[str, Any] = {
        **{name: value for dimension in DIMENSIONS.values() for name, value in dimension.message(request).items()},
        "rid": request.id,
        "input_text": "",
        "input_ids": array("q", request.prompt) if _takes_arrays(TokenizedGenerateReqInput) else list(request.prompt),
        "mm_inputs": None,
        "sampling_params": sampling,
        "input_embeds": None,
        "token_type_ids": None,
        "custom_logit_processor": processor,
        "lora_id": _adapter_name(request.adapter),
        "session_params": _of_session(request.session) if request.session else None,
    }
    fields = getattr(TokenizedGenerateReqInput, "__struct_fields__", None)
    names = fields or [field.name for field in dataclasses.fields(TokenizedGenerateReqInput)]
    if missing := [name for name, value in values.items() if name not in names and value not in (None, False, "")]:
        raise NotDriven(f"request {request.id!r}: a request of this release has no {', '.join(missing)}")
    return TokenizedGenerateReqInput(**{name: value for name, value in values.items() if name in names})


def _adapter_name(adapter: Adapter | None) -> str | None:
    if adapter is None:
        return None
    from ..case_requests import name_of

    return name_of(adapter)


def _of_session(name: str) -> Any:
    from sglang.srt.managers import io_struct

    return io_struct.SessionParams(id=name)


def knows_last_state() -> bool:
    """Whether a request may ask for the last hidden state alone (0.5.17 and later)."""
    from sglang.srt.managers import io_struct

    return hasattr(io_struct, "get_return_hidden_states_mode")
