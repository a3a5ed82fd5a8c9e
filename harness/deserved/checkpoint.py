"""A checkpoint in Hugging Face's layout: its configuration, its tensors and the sizes of a Llama that they have; and prompts,
which its tokenizer takes apart.

A checkpoint is a folder, or the name of one on the hub. Files of tensors are safetensors, or pickles that torch reads without
running code (`weights_only`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagletwin.harness.core.errors import EagletwinError, InputError
from eagletwin.reference.sizes import LlamaShape, RopeScaling

_FILES = ("*.json", "*.safetensors", "*.bin", "*.model", "*.txt")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a config.json."""

    folder: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """What config.json says; that of the text model where it has one of its own."""
        file = self.folder / "config.json"
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise unreadable(file, error.strerror or str(error)) from error
        except ValueError as error:
            raise unreadable(file, str(error)) from error
        if not isinstance(said, dict):
            raise unreadable(file, "it holds no object")
        text: Mapping[str, Any] = said.get("text_config", said)
        return {**said, **text}

    @property
    def architecture(self) -> str:
        """The class that serves it, by its name."""
        names = self.config.get("architectures") or ["none"]
        return str(names[0])

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name. Raises InputError for a file that cannot be read, and where there is none."""
        files = sorted(self.folder.glob("*.safetensors")) or sorted(self.folder.glob("pytorch_model*.bin"))
        if not files:
            raise InputError(
                f"{self.folder} holds no *.safetensors and no pytorch_model*.bin",
                consequence="there are no weights to compute with",
                remedy="name the folder that the server loads",
            )
        found: dict[str, Tensor] = {}
        for file in files:
            try:
                found |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
            except (SafetensorError, OSError, RuntimeError, ValueError) as error:
                raise unreadable(file, str(error).splitlines()[0]) from error
        return found

    @cached_property
    def shape(self) -> LlamaShape:
        """The sizes of the decoder layers. Raises InputError for a size that is missing, and for a rotary embedding that the
        reference does not know."""
        config = self.config
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            return LlamaShape(
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                rope_theta=float(_rope(config).get("rope_theta", 10000.0)),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                qk_norm=str(config.get("model_type", "")).startswith("qwen3"),
                rope_scaling=_scaling(config),
            )
        except KeyError as error:
            raise unreadable(self.folder / "config.json", f"it does not say {error.args[0]}") from error


def checkpoint(name: str) -> Checkpoint:
    """The checkpoint in a folder, or of this name on the hub. Raises InputError where there is none."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return Checkpoint(folder)
    if folder.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise InputError(
            f"{name} is no folder",
            consequence="there is no checkpoint to compute with",
            remedy="name a folder with a config.json, or OWNER/NAME of the Hugging Face hub",
        )
    from huggingface_hub import snapshot_download

    try:
        return Checkpoint(Path(snapshot_download(name, allow_patterns=list(_FILES))))
    except Exception as error:  # a network, a name, a licence: the library's errors have no root of their own
        raise InputError(
            f"{name} is no folder here, and the hub does not give it: {str(error).splitlines()[0]}",
            consequence="there is no checkpoint to compute with",
            remedy="download it first, and name its folder",
        ) from error


def unreadable(file: Path, why: str) -> InputError:
    """What to raise for a file of a checkpoint that cannot be used."""
    return InputError(
        f"{file} cannot be read: {why}",
        consequence="nothing is known of this pair",
        remedy="name a complete checkpoint in Hugging Face's layout",
    )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a configuration says of its rotary embedding: transformers 5 has all in rope_parameters, older files apart."""
    said: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config["rope_theta"], **said} if "rope_theta" in config else said


def _scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    said = _rope(config)
    kind = said.get("rope_type", said.get("type", "default"))
    original = int(said.get("original_max_position_embeddings") or config.get("max_position_embeddings", 0))
    if kind == "default":
        return None
    factor = float(said["factor"])
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "llama3":
        seldom, often = float(said["low_freq_factor"]), float(said["high_freq_factor"])
        return RopeScaling(kind="llama3", factor=factor, original=original, seldom=seldom, often=often)
    if kind == "yarn" and not said.get("mscale"):
        import math

        amplitude = said.get("attention_factor") or (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original=original,
            seldom=float(said.get("beta_slow") or 1),
            often=float(said.get("beta_fast") or 32),
            amplitude=float(amplitude),
            truncate=bool(said.get("truncate", True)),
        )
    raise InputError(
        f"the configuration asks for a rotary embedding of type {kind!r}, which the reference does not have",
        consequence="nothing is known of this pair",
        remedy="name a pair with one of: default, linear, llama3, yarn",
    )


# Prompts from a file: token ids, or text that the target's own tokenizer takes apart.
#
# One prompt a line. A line that begins with `{` is JSON: `input_ids` (a list) or `prompt` (a text); `completion_ids` or
# `completion` go on with it, and are taken in place of what the target would say. Any other line is a prompt as it stands.

MAX_LINES = 100_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and of what follows it if the file says so."""

    ids: tuple[int, ...]
    completion: tuple[int, ...] | None = None


def read_prompts(file: Path, target: Checkpoint, limit: int = MAX_LINES) -> list[Prompt]:
    """The prompts of a file, at most `limit`. Raises InputError for a file that cannot be read, a line that is neither, and a
    file without a prompt."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file} cannot be read: {error}",
            consequence="there are no prompts",
            remedy="name a text file with one prompt a line, or a line of JSON each",
        ) from error
    encode = _encoder(target)
    found = [_prompt(line, f"{file}:{number}", encode) for number, line in enumerate(lines[:MAX_LINES], 1) if line.strip()]
    if not found:
        raise InputError(f"{file} has no prompt", consequence="nothing was measured", remedy="write one prompt a line")
    return found[:limit]


def _encoder(target: Checkpoint) -> Callable[[str], list[int]]:
    """Takes a text apart by the target's tokenizer, which is loaded when a text needs it."""

    @cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(target.folder, local_files_only=True)
        except Exception as error:  # of many libraries
            raise EagletwinError(
                f"{target.folder} has no tokenizer that transformers can load: {str(error).splitlines()[0]}",
                consequence="a prompt of text cannot be taken apart",
                remedy='give token ids, a line of JSON each: {"input_ids": [1, 2, 3]}',
            ) from error

    return lambda text: list(tokenizer()(text)["input_ids"])


def _prompt(line: str, where: str, encode: Callable[[str], list[int]]) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(tuple(encode(line)))
    try:
        said = json.loads(line)
        ids = said["input_ids"] if "input_ids" in said else encode(said["prompt"])
        after = said.get("completion_ids")
        if after is None and "completion" in said:
            after = encode(said["prompt"] + said["completion"])[len(ids) :]
        if not ids or not all(type(token) is int for token in [*ids, *(after or [])]):
            raise ValueError("a prompt is a list of one or more whole numbers")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{where} is no prompt: {error}",
            consequence="nothing was measured",
            remedy='write {"input_ids": [1, 2, 3]} or {"prompt": "..."}, or a line of plain text',
        ) from error
    return Prompt(tuple(ids), None if after is None else tuple(after))
