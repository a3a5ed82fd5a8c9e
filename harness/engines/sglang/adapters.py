"""Adapters (LoRA) of a case's requests, as SGLang is given them: its server arguments, and the message by which a server loads
one from a folder. Imported in a process that has SGLang.
"""

from typing import Any

from eagletwin.harness.core.case import Adapter, Case
from eagletwin.harness.families.adapters import MOST_RANK, PROJECTIONS, modules
from eagletwin.harness.families.store import adapter_folder

from .not_driven import NotDriven


def arguments(case: Case) -> dict[str, Any]:
    """Fields of ServerArgs. Which adapters there will be is not known when an engine is started."""
    if not case.adapters:
        return {}
    settings = case.engine.sglang
    return {
        "enable_lora": True,
        "max_lora_rank": MOST_RANK,
        "lora_target_modules": modules(Adapter()),
        "max_loras_per_batch": settings.max_loras_per_batch,
        "lora_backend": settings.lora_backend,
    }


def refuse() -> None:
    """Raises NotDriven where this release loads none."""
    from sglang.srt.managers import io_struct

    if not hasattr(io_struct, "LoadLoRAAdapterReqInput"):
        raise NotDriven("adapters: this release loads none while it runs")


def name_of(adapter: Adapter) -> str:
    """An id as SGLang's own: 32 hexadecimal digits, other ones for another adapter."""
    on = tuple(PROJECTIONS).index(adapter.on)
    return f"{adapter.seed:016x}{adapter.rank:08x}{on:08x}"


def load(scheduler: Any, case: Case) -> None:
    """Give the scheduler those adapters of a case that it does not have. Raises RuntimeError with its word if it refuses.

    On a CPU SGLang makes an MLP's width a multiple of 32, and does not so with an adapter's: it gets one that is as wide."""
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

    runner = scheduler.tp_worker.model_runner
    inner, manager = runner.model_config.hf_config.intermediate_size, runner.lora_manager
    for adapter in case.adapters:
        name = name_of(adapter)
        if name in manager.loras:
            continue
        folder = str(adapter_folder(case.model, adapter, inner))
        answer = scheduler._request_dispatcher(LoadLoRAAdapterReqInput(lora_name=name, lora_path=folder, lora_id=name))
        if not answer.success:
            raise RuntimeError(f"an adapter was not loaded: {answer.error_message}")
