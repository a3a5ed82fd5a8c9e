"""Recipes as checkpoints on disk, in the cache: what an engine loads.

A checkpoint is named by the digest of its weights, written to a temporary folder and renamed, so that any number of
processes may ask for it at once and a half-written one is never seen.
"""

import contextlib
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save

from eagletwin.harness.core.case import Adapter
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE, Dtype, Engine

from . import RECIPES, adapters, family_of, llama
from .eagle3 import AUX_LAYERS
from .recipe import Part, Recipe, sizes
from .weights import ModelPair, model_pair, other_pair


def checkpoints(
    name: str, dtype: Dtype = "float32", engine: Engine = DEFAULT_ENGINE, *, eagle_config: bool = False
) -> tuple[Path, Path]:
    """Folders of the target's and the draft's checkpoint of the recipe called `name`, written first if they are absent.

    dtype: the type that both name, for a target that computes in it whatever it is asked; weights are float32 on disk
    eagle_config: whether a head names its layers there alone
    """
    return _write_pair(name, model_pair(name), dtype, engine, eagle_config=eagle_config)


def other_checkpoints(name: str) -> tuple[Path, Path]:
    """The same with other weights, to be replaced by those of `whole_checkpoint`."""
    return _write_pair(name, other_pair(name))


def whole_checkpoint(name: str) -> Path:
    """One folder with the target's and the draft's weights: what a weight update names, since it names one path for both.

    Each takes what it knows by name and passes over the rest.
    """
    recipe, pair = RECIPES[name], model_pair(name)
    weights = {**pair.target, **pair.draft}
    both = pair.target.keys() & pair.draft.keys()
    if both:
        raise InputError(
            f"{name}: {min(both)} is a weight of both target and draft, and an update of weights names one folder for the two",
            consequence="no case was run on this configuration",
            remedy="leave update_weights out, or use another model",
        )
    files = {"whole": checkpoint_files(llama.target_part(recipe, weights), recipe)}
    return _write_folder(cache_folder("models") / f"{name}-{pair.digest[:16]}-whole", files) / "whole"


def adapter_folder(model: str, adapter: Adapter, inner: int) -> Path:
    """An adapter of this model as PEFT writes one: what a server is named to load it.

    inner: how wide the MLP is where it is loaded; SGLang's on a CPU is wider than the model's, by zeros"""
    weights = {
        f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight": matrix
        for name, part in adapters.pad_adapter(adapters.make_adapter(model, adapter), inner).items()
        for side, matrix in (("A", part.down), ("B", part.up))
    }
    configuration = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapters.alpha(adapter),
        "target_modules": adapters.modules(adapter),
    }
    files = {"adapter_config.json": json.dumps(configuration).encode(), "adapter_model.safetensors": save(weights)}
    name = f"{model}-{model_pair(model).digest[:16]}-adapter-{adapter.seed}-{adapter.rank}-{adapter.on}-{inner}"
    return _write_folder(cache_folder("models") / name, {"adapter": files}) / "adapter"


def _write_pair(
    name: str, pair: ModelPair, dtype: Dtype = "float32", engine: Engine = DEFAULT_ENGINE, *, eagle_config: bool = False
) -> tuple[Path, Path]:
    recipe = RECIPES[name]
    family = family_of(recipe)
    target, draft = family.checkpoint(recipe, pair.target, pair.draft)
    if engine == "vllm":
        draft = family.on_vllm(draft)
    if eagle_config:
        draft = replace(draft, config={key: value for key, value in draft.config.items() if key != AUX_LAYERS})
    files = {"target": checkpoint_files(target, recipe, dtype), "draft": checkpoint_files(draft, recipe, dtype)}
    of_type = ("" if dtype == "float32" else f"-{dtype}") + ("" if engine == DEFAULT_ENGINE else f"-{engine}")
    of_type += "-eagle-config" if eagle_config else ""
    final = _write_folder(cache_folder("models") / f"{name}-{pair.digest[:16]}{of_type}", files)
    return final / "target", final / "draft"


def _write_folder(final: Path, files: dict[str, dict[str, bytes]]) -> Path:
    """The folder, with these files in it: part -> file -> contents."""
    if not _holds(final, files):  # absent, or damaged: weights that are not the recipe's would be blamed on the engine
        scratch = Path(tempfile.mkdtemp(dir=final.parent, prefix=".partial-"))
        for part, contents in files.items():
            (scratch / part).mkdir()
            for file, data in contents.items():
                (scratch / part / file).write_bytes(data)
        if final.exists() and not _holds(final, files):
            with contextlib.suppress(FileNotFoundError):  # another process took it away first
                final.rename(scratch / "damaged")
        try:
            scratch.rename(final)
        except OSError:  # another process was first; its files are the same
            shutil.rmtree(scratch)
    return final


def _holds(folder: Path, files: dict[str, dict[str, bytes]]) -> bool:
    try:
        return all(
            (folder / part / file).read_bytes() == data for part, contents in files.items() for file, data in contents.items()
        )
    except OSError:
        return False


def checkpoint_files(part: Part, recipe: Recipe, dtype: Dtype = "float32") -> dict[str, bytes]:
    """A checkpoint: file name -> contents. What the part's own config says goes before what the recipe says."""
    shape = part.shape
    config = {
        "model_type": "llama",
        **sizes(recipe, shape),
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": recipe.end_of_sequence,
        **part.config,
    }
    return {"config.json": json.dumps(config, indent=1).encode(), "model.safetensors": save(part.weights)}
