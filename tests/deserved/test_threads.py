"""Torch's threads sleep while they wait: the commands that compute say so before torch is loaded, which is when it is read."""

from pathlib import Path

import pytest

from ..harness.doors import opened, program

# Says what torch's OpenMP will read, when somebody first looks for torch.
WATCH = """
import os
os.environ.pop("OMP_WAIT_POLICY", None)
class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.meta_path.remove(self)
            print("policy", os.environ.get("OMP_WAIT_POLICY"))
sys.meta_path.insert(0, Watch())
"""


@pytest.mark.slow  # imports torch
def test_threads_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "x").touch()  # no checkpoint: the command ends behind its imports
    done = opened(
        program(WATCH, "acceptance", "--target", "x", "--draft", "x", "--prompts", "x"), tmp_path, path=tmp_path
    )  # a process of its own, which has no torch yet
    assert "policy PASSIVE" in done.stdout, done
