"""Checkpoints in the cache are the recipe's, or are written again."""

from pathlib import Path

import pytest

from eagletwin.harness.families.store import checkpoints


def test_a_damaged_checkpoint_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path))
    target, draft = checkpoints("llama-tiny")
    file = draft / "model.safetensors"
    good = file.read_bytes()
    for damage in (good[:-1] + bytes([good[-1] ^ 1]), good[:100], b""):
        file.write_bytes(damage)
        assert checkpoints("llama-tiny") == (target, draft)
        assert file.read_bytes() == good
