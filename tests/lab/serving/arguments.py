"""What a server is asked for, as arguments of SGLang's launch_server; and the model classes that its checkpoints name.

The caller's further arguments come last, and so win. Called by server.py.
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.engines.sglang.boot import registry
from eagletwin.harness.families import RECIPES, family_of

from .messages import Serve

# Tokens of the KV pool and requests at once, unless the caller says otherwise: a share of the memory of a host, which SGLang
# would take, is millions of rows of a small model.
_TOKENS, _REQUESTS = 32768, 16


def words(asked: Serve) -> list[str]:
    """Arguments of launch_server. Raises NotDriven for a draft whose configuration cannot be read."""
    named = {
        "model-path": asked.target,
        "speculative-draft-model-path": asked.draft,
        **_draft_arguments(asked),
        "speculative-eagle-topk": asked.topk,
        "speculative-num-steps": asked.num_steps,
        "speculative-num-draft-tokens": asked.num_draft_tokens,
        "page-size": asked.page_size,
        "chunked-prefill-size": asked.chunked_prefill_size,
        "host": "127.0.0.1",
        "port": asked.port,
        "device": "cpu",
        "dtype": asked.mode.dtype,
        "attention-backend": "triton",
        "triton-attention-num-kv-splits": 1,  # more splits change the order of sums, and so the last bits
        "sampling-backend": "pytorch",
        "disable-cuda-graph": True,
        "disable-custom-all-reduce": True,
        "disable-overlap-schedule": not asked.mode.overlap,
        "swa-full-tokens-ratio": 1.0,
        "mem-fraction-static": 0.1,
        "max-total-tokens": _TOKENS,
        "max-running-requests": _REQUESTS,
        "random-seed": 0,
        "skip-tokenizer-init": not _has_tokenizer(Path(asked.target)),
        "skip-server-warmup": True,  # its requests would lie in the prefix cache
        "sleep-on-idle": True,  # an idle scheduler would take a core
        "log-level": "error",
    }
    return [*_format_arguments(named), *asked.more]


def settings(asked: Serve) -> dict[str, Any]:
    """What the scheduler must use, as boot.differing() knows it; not what the caller's further arguments name anew."""
    given = {
        "topk": ("speculative-eagle-topk", asked.topk),
        "num_steps": ("speculative-num-steps", asked.num_steps),
        "num_draft_tokens": ("speculative-num-draft-tokens", asked.num_draft_tokens),
        "page_size": ("page-size", asked.page_size),
        "chunked_prefill_size": ("chunked-prefill-size", asked.chunked_prefill_size),
        "dtype": ("dtype", asked.mode.dtype),
        "overlap": ("disable-overlap-schedule", asked.mode.overlap),
    }
    renamed = {word.removeprefix("--").partition("=")[0] for word in asked.more}
    return {name: value for name, (word, value) in given.items() if value is not None and word not in renamed}


def register_models(asked: Serve) -> None:
    """Have SGLang's registry know the classes that the checkpoints name, and no others: there are hundreds."""
    if asked.model:
        registry.register(family_of(RECIPES[asked.model]).modules)
    names = [name for folder in (asked.target, asked.draft) for name in _configuration(Path(folder)).get("architectures", [])]
    find(names)


def find(classes: list[str]) -> None:
    """Have SGLang's registry know these of SGLang's own classes, where it does not: found by the source that defines them."""
    from sglang.srt.models.registry import ModelRegistry

    for name in classes:
        if name not in ModelRegistry.models:
            registry.register(tuple(_modules_with(name)))


def _modules_with(name: str) -> list[str]:
    found = importlib.util.find_spec("sglang.srt.models")
    places = found.submodule_search_locations if found is not None else None
    files = sorted(file for place in places or () for file in Path(place).glob("*.py"))
    defines = re.compile(rf"^class {re.escape(name)}\b", re.MULTILINE)
    return [f"sglang.srt.models.{file.stem}" for file in files if defines.search(file.read_text(encoding="utf-8"))]


def _format_arguments(named: dict[str, object]) -> list[str]:
    found = []
    for name, value in named.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not None and value is not False:
            found += [f"--{name}", str(value)]
    return found


def _draft_arguments(asked: Serve) -> dict[str, object]:
    """Which head the draft is: as its recipe says, else by the name of its class, as SGLang's own classes are named."""
    if asked.model:
        recipe = RECIPES[asked.model]
        if 0 < recipe.mtp_layers < asked.num_steps:
            raise NotDriven(f"num_steps {asked.num_steps}: {asked.model} has {recipe.mtp_layers} draft layers")
        fields = {
            "speculative_algorithm": recipe.algorithm,
            "enable_multi_layer_eagle": recipe.mtp_layers > 0,
            **family_of(recipe).arguments(recipe),
        }
        return {name.replace("_", "-"): value for name, value in fields.items()}
    architectures = " ".join(_configuration(Path(asked.draft)).get("architectures", []))
    return {
        "speculative-algorithm": "EAGLE3" if re.search("eagle-?3", architectures, re.IGNORECASE) else "EAGLE",
        "enable-multi-layer-eagle": architectures.endswith("MTP"),
    }


def _configuration(folder: Path) -> dict[str, list[str]]:
    try:
        found: dict[str, list[str]] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise NotDriven(f"{folder / 'config.json'}: {error}") from error
    return found


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))
