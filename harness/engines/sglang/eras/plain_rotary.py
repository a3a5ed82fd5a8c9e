"""SGLang's rotary embeddings of latent attention on a CPU: it makes those of a lengthened context there, and no others.

Without a scaling `get_rope_cpu` ends in an assertion. What SGLang makes on every other device then serves a CPU too, in plain
torch. Called by boot.py for recipes with latent rows. Seen on 0.5.9, where rotary embeddings are one module, 0.5.12.post1,
0.5.17, 0.5.22 and 0.5.23.
"""

import importlib
from typing import Any

_MODULES = ("sglang.srt.layers.rotary_embedding.factory", "sglang.srt.layers.rotary_embedding")


def allow(shims: list[str]) -> None:
    """Before a model is built."""
    module: Any = next(filter(None, map(_with_both, _MODULES)))
    of_cpu, of_others = module.get_rope_cpu, module.get_rope
    if hasattr(of_cpu, "eagletwin"):
        return

    def get_rope(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: int,
        is_neox_style: bool = True,
        rope_scaling: dict[str, Any] | None = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        known = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling)
        return of_others(*known) if rope_scaling is None else of_cpu(*known, *more, **named)

    get_rope.eagletwin = True  # type: ignore[attr-defined]
    module.get_rope_cpu = get_rope
    shims.append("get_rope_cpu: without a scaling, what get_rope makes on other devices")


def _with_both(name: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    return module if hasattr(module, "get_rope_cpu") else None
