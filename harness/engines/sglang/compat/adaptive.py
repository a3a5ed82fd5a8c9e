"""Adaptive numbers of draft steps: which releases have them, how they are switched on, and how their controller begins anew.

0.5.13 has them by the size of a batch, 0.5.14 with 0 among the choices; older ones have one choice for all sizes, or none.
"""

import importlib
import importlib.util
import json
import os
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Adaptive, Case
from eagletwin.harness.engines.inside.blame import NotDriven

_POLICY = "sglang.srt.speculative.adaptive_spec_params"
_CONTEXT = "sglang.srt.runtime_context"


def refuse(settings: Adaptive) -> None:
    """Raises NotDriven."""
    known = importlib.util.find_spec(_POLICY) and hasattr(_policy(), "get_steps_for_batch")
    if not known:
        raise NotDriven("adaptive steps: this release does not choose them by the size of a batch (0.5.13 and later do)")
    if 0 in settings.choices and not _drafts_none():
        raise NotDriven(
            "adaptive steps with 0 among them: SGLang would refuse its own configuration, since this release drafts in every "
            "round; leave the 0 out of `tiers`, or run 0.5.14 or later"
        )


def _drafts_none() -> bool:
    """Whether a round may have no draft steps."""
    return hasattr(importlib.import_module("sglang.srt.environ").envs, "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND")


def arguments(settings: Adaptive | None) -> dict[str, Any]:
    """Fields of ServerArgs. The table is a file, as SGLang reads it, in the engine's own folder."""
    if settings is None:
        return {}
    return {"speculative_adaptive": True, "speculative_adaptive_config": str(_write_settings(settings))}


def controller(scheduler: Any) -> Any:
    """What chooses the steps of this scheduler's rounds; None where nothing does."""
    return getattr(scheduler.draft_worker, "adaptive_controller", None)


def states(scheduler: Any) -> list[Any]:
    """What a round has by its number of steps, backends and graphs among it, of all numbers; none where nothing chooses."""
    own = controller(scheduler)
    return [] if own is None else list(own._states.values())


FED = "on_verify_complete_cpu"  # a method of the worker


def parts(of: Any, verify_input: Any) -> dict[str, Array]:
    """The number of draft steps of the round that runs, as each part of the worker holds it: `steps`, and how many nodes each
    holds a chain to have: `nodes`. In the order of STEPS_OF and NODES_OF in core/records.py; -1: a part that this round has
    not."""
    bag, drafter = _running_configuration(of), of.drafter
    own, extends = drafter.draft_attn_backend, drafter.draft_extend_attn_backend is not None and _extends_by_it(drafter)
    extend = of.drafts[0].attn_backend if extends else None  # what the forward finds; else one serves all numbers of steps
    target = of.target.attn_backend
    steps = [
        of.worker.speculative_num_steps,
        drafter.speculative_num_steps,
        bag.speculative_num_steps,
        verify_input.spec_steps,
        getattr(own, "speculative_num_steps", -1) if of.steps > 1 else -1,
        _steps_of(target),
        _steps_of(extend),
    ]
    nodes = [
        of.worker.speculative_num_draft_tokens,
        drafter.speculative_num_draft_tokens,
        bag.speculative_num_draft_tokens,
        verify_input.draft_token_num,
        _nodes_of(target),
        _nodes_of(extend),
    ]
    return {"steps": np.array([int(n) for n in steps]), "nodes": np.array([int(n) for n in nodes])}


def _steps_of(backend: Any) -> int:
    """-1 for FlashAttention, which holds the number in draft decode alone."""
    return -1 if hasattr(backend, "fa_impl_ver") else getattr(backend, "speculative_num_steps", -1)


def _nodes_of(backend: Any) -> int:
    return getattr(backend, "num_draft_tokens", getattr(backend, "speculative_num_draft_tokens", -1))


def _extends_by_it(drafter: Any) -> bool:
    """Whether a draft extend outside graphs attends by the backend that changes with the steps. In 0.5.13 it attends by that of
    the draft's model, which serves all numbers of steps."""
    chosen = getattr(type(drafter), "init_attention_backend", None)
    return chosen is None or "attn_backend" in chosen.__code__.co_names


def _running_configuration(of: Any) -> Any:
    """Up to 0.5.16 the arguments themselves are changed as the server runs; 0.5.13 has no module of what runs."""
    context: Any = importlib.import_module(_CONTEXT) if importlib.util.find_spec(_CONTEXT) else None
    return context.get_spec() if hasattr(context, "get_spec") else of.worker.server_args


def restart(scheduler: Any, case: Case) -> None:
    """As a new scheduler begins: cases share one, whose controller remembers the drafts that the case before it accepted."""
    if case.engine.sglang.adaptive is None:
        return
    own = controller(scheduler)
    graphs = getattr(own.params, "_cuda_graph_bs", None)
    own.params = _policy()(initial_steps=case.num_steps, cfg_path=str(_write_settings(case.engine.sglang.adaptive)))
    if graphs is not None:  # the choice goes by the size that a graph pads a batch to
        own.params.set_cuda_graph_bs(graphs)
    own._activate(case.num_steps)


def _policy() -> Any:
    return importlib.import_module(_POLICY).AdaptiveSpeculativeParams


def _write_settings(settings: Adaptive) -> Path:
    """A file for these settings alone, and whole as soon as it has its name: another rank may read it in this moment."""
    table: dict[str, Any] = {str(tier.batch): {"candidate_steps": list(tier.steps)} for tier in settings.tiers}
    table |= {
        "ema_alpha": settings.alpha,
        "update_interval": settings.interval,
        "warmup_batches": settings.warmup,
        "up_hysteresis": settings.up,
        "down_hysteresis": settings.down,
        "ceiling_coeff": settings.ceiling,
    }
    text = json.dumps(table).encode()
    path = Path(tempfile.gettempdir(), f"adaptive-{sha256(text).hexdigest()}.json")
    if not path.exists():
        number, begun = tempfile.mkstemp(suffix=".json", prefix="adaptive-begun-")
        with os.fdopen(number, "wb") as file:
            file.write(text)
        os.replace(begun, path)
    return path
