"""SGLang's own pipeline of two stages, a process each on a CPU, with EAGLE on the last one: what it answers, as JSON.

`python -m tests.engine.pipeline CASE PORT [TARGET MATCH REPLACEMENT]` hands all requests of a case file to the first stage
before its first iteration, and changes a function of SGLang before, if it is named. Run by test_pipeline.py, with a folder of
its own for temporary files.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

_STAGES = 2
_ITERATIONS = 400  # far more than the few tokens of a test need
_ENVIRONMENT = {
    "SGLANG_ENABLE_PP_SPEC": "1",  # without it SGLang has EAGLE in the stages of a server of prefills alone
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0",
    "SGLANG_NCCL_SO_PATH": "none: there is no GPU",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "eagletwin.harness.engines.sglang.boot.served",
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    os.environ |= _ENVIRONMENT
    from eagletwin.harness.core.mode import Mode
    from eagletwin.harness.core.patch import Edit
    from eagletwin.harness.engines.sglang import patches
    from eagletwin.harness.engines.sglang.boot import boot
    from eagletwin.harness.engines.sglang.eras import processwide, requests, workers
    from eagletwin.harness.families import RECIPES
    from eagletwin.harness.families.valid import read_case

    case, port, fault = read_case(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3:]
    boot.import_sglang()
    import torch
    from sglang.srt.managers import scheduler as scheduler_module
    from sglang.srt.server_args import PortArgs, ServerArgs

    if fault:
        patches.rewrite(Edit(target=fault[0], match=fault[1], replacement=fault[2]))
    stage = 0 if os.fork() else 1
    mode = Mode(tp=_STAGES)  # ranks that meet others
    boot._make_able(case, mode)
    workers.choose(case, boot.SHIMS)
    arguments = ServerArgs(**boot._arguments(case, mode), tp_size=1, pp_size=_STAGES, nccl_port=port)
    ports = PortArgs.init_new(arguments)
    world = scheduler_module.spawn_world_rank(arguments, tp_rank=0, pp_rank=stage)
    ranks = scheduler_module.SpawnRanks(world_rank=world, dp_rank=None, gpu_id=stage)
    scheduler_module.publish(arguments, role="scheduler", ranks=ranks)
    scheduler: Any = scheduler_module.Scheduler(arguments, ports, **processwide.ranks_of(scheduler_module.Scheduler, stage))
    answers: dict[str, list[int]] = {}
    calls = 0

    def sent(_sender: Any, payload: Any, *_args: Any, **_kwargs: Any) -> None:
        for name, tokens, why in zip(payload.rids, payload.output_ids, payload.finished_reasons, strict=True):
            answers.setdefault(name, []).extend(tokens)
            waiting.discard(name if why else "")
        if not waiting:
            print(json.dumps(answers), flush=True)
            os._exit(0)

    def received(_receiver: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        if calls > _ITERATIONS:
            os._exit(1)
        size = RECIPES[case.model].target.vocab_size
        return [requests.tokenized(request, size) for request in case.requests] if calls == 1 else []

    if stage == 0:
        waiting = {request.id for request in case.requests}
        type(scheduler.ipc_channels.send_to_detokenizer).send_output = sent
        type(scheduler.request_receiver)._pull_raw_reqs = received
    with torch.inference_mode():
        scheduler.run_event_loop()


if __name__ == "__main__":
    main()
