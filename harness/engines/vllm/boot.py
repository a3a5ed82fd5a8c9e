"""Import vLLM, and build the real EngineCore of a configuration on CPU tensors. Called by zygote.py.

What is changed on the way is listed by name in SHIMS, which every trace carries: what only the compiled extension has, and what
asks a GPU.
"""

import importlib
import os
from typing import Any

import torch

from eagletwin.harness.core.case import Case, VLLMSettings
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.store import checkpoints
from eagletwin.harness.families.valid import not_driven
from eagletwin.harness.families.weights import model_pair

SHIMS: list[str] = []

# What each engine, or its first case, would import.
_IMPORTED = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.v1.spec_decode.eagle",
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.llama_eagle",
    "vllm.model_executor.models.llama_eagle3",
    "transformers.models.llama",
)
_library: Any = torch.library
_extension = _library.Library("_C", "FRAGMENT")  # the namespace of vLLM's extension, which is not there


def import_vllm() -> None:
    """Everything that is the same for all configurations. Takes seconds; once per process."""
    torch.set_num_threads(1)
    for name in _IMPORTED:
        importlib.import_module(name)
    _stand_in_for_the_extension()
    _choose_attention()


def _stand_in_for_the_extension() -> None:
    _extension.define("init_cpu_memory_env(int[] nodes) -> ()")
    _extension.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    SHIMS.append("torch.ops._C.init_cpu_memory_env: does nothing; it binds memory to a NUMA node")
    _extension.define("greedy_argmax(Tensor logits) -> Tensor")
    _extension.impl("greedy_argmax", lambda logits: logits.argmax(-1), "CompositeExplicitAutograd")
    SHIMS.append("torch.ops._C.greedy_argmax: argmax")


def _choose_attention() -> None:
    """vLLM's own Triton backend, which runs on GPUs, and not its C++ one for CPUs."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = AttentionBackendEnum.TRITON_ATTN.get_path()
    CpuPlatform.get_attn_backend_cls = classmethod(lambda cls, *args, **kwargs: path)
    SHIMS.append("CpuPlatform.get_attn_backend_cls: TRITON_ATTN, and not CPU_ATTN, which is compiled")
    torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 0)
    SHIMS.append("torch.cuda.get_device_capability: (9, 0)")


def build_core(case: Case) -> Any:
    """The real EngineCore, with scheduler, worker, model runner and drafter, for this case's configuration. Raises NotDriven,
    and what vLLM raises."""
    if why := not_driven(case, Mode(engine="vllm")):
        raise NotDriven(why)
    settings = case.vllm
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(settings.model_runner == "v2"))
    from vllm import envs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    envs.disable_envs_cache()
    configuration = _configuration(case)
    if settings.async_scheduling:
        configuration.scheduler_config.async_scheduling = True
        SHIMS.append("CpuPlatform.check_and_update_config: async_scheduling stays on, which it switches off on a CPU")
    core = EngineCore(configuration, UniProcExecutor, log_stats=False)
    if core.vllm_config.use_v2_model_runner != (settings.model_runner == "v2"):
        raise NotDriven(f"vLLM does not take model runner {settings.model_runner} for this configuration")
    _add_bias(case, drafter_of(core))
    return core


def _configuration(case: Case) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    settings, recipe = case.vllm, RECIPES[case.model]
    most = min(recipe.max_position, settings.num_gpu_blocks * case.page_size)
    target, draft = checkpoints(case.model, engine="vllm", eagle_config=settings.eagle_config)
    return EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=min(most, settings.max_model_len or most),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=case.chunked_prefill_size + settings.max_num_seqs * (case.num_steps + 1),
        block_size=case.page_size,
        num_gpu_blocks_override=settings.num_gpu_blocks + 1,  # the first is the null block
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=settings.enable_prefix_caching,
        async_scheduling=False,
        disable_log_stats=True,
        per_request_spec_decode_metrics="detailed",
        speculative_config={
            "method": family_of(recipe).vllm_method,
            "model": str(draft),
            "num_speculative_tokens": case.num_steps,
            "draft_sample_method": settings.draft_sample_method,
            **_keys_of_blocks(settings),
        },
        compilation_config={"mode": 0, "custom_ops": ["none"]},
        seed=0,
    ).create_engine_config()


def _keys_of_blocks(settings: VLLMSettings) -> dict[str, bool]:
    """Whether keys of blocks cover the token after them. A release without the option (0.32.0) has none that do."""
    from vllm.config import SpeculativeConfig

    if "disable_lookahead_block_hashes" in SpeculativeConfig.__dataclass_fields__:
        return {"disable_lookahead_block_hashes": settings.disable_lookahead_block_hashes}
    if settings.enable_prefix_caching and not settings.disable_lookahead_block_hashes:
        raise NotDriven("in this vLLM keys of blocks do not cover the token after them: set disable_lookahead_block_hashes")
    return {}


def runner_of(core: Any) -> Any:
    """The model runner."""
    return core.model_executor.driver_worker.worker.model_runner


def drafter_of(core: Any) -> Any:
    """The speculator of runner V2, or the proposer of V1."""
    runner = runner_of(core)
    return runner.drafter if hasattr(runner, "drafter") else runner.speculator


def _add_bias(case: Case, drafter: Any) -> None:
    """The recipe's head of EAGLE-1 has a bias in its fc, as its paper's code has; vLLM's class has none."""
    bias = model_pair(case.model).draft.get("fc.bias")
    if bias is not None:
        head = drafter.model.model.fc
        head.register_forward_hook(lambda module, given, result: result + bias)
        SHIMS.append("EagleLlamaForCausalLM.fc: the recipe's bias is added, for which vLLM's class has no place")
