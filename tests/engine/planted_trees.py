"""Copies of a release, the installed one unless another is named, with its dist-info, in which something was changed."""

from pathlib import Path

from eagletwin.harness.engines.source import INSTALLED, Source, link_tree


def plant(root: Path, *edits: tuple[str, str, str], source: Source = INSTALLED) -> Path:
    """Make a copy in `root` and edit it: (file below sglang/, text that occurs once, its replacement)."""
    names = (source.engine, f"{source.engine}-{source.called}.dist-info")
    link_tree([source.root / name for name in names], root, "multimodal_gen")
    for edit in edits:
        change(root, *edit)
    return root


def change(root: Path, file: str, old: str, new: str) -> None:
    """Edit a file of a copy, and no file that others share with it."""
    place = root / "sglang" / file
    text = place.read_text()
    assert text.count(old) == 1, (file, old, text.count(old))
    place.unlink()
    place.write_text(text.replace(old, new))


# Only a GPU's path launches this kernel, and only a GPU's path calls this method.
IDLE_KERNEL = (
    "kernels/ops/speculative/eagle.py",
    "    tl.store(ids + offset, tokens.to(tl.int64), offset < TOKENS)\n\n\ndef prepare",
    "    tl.store(ids + offset, tokens.to(tl.int64) + 1, offset < TOKENS)\n\n\ndef prepare",
)
IDLE_NAME = "sglang.kernels.ops.speculative.eagle._draft_extend_inputs_kernel"
# Every round of a chain of two steps or more calls this one, which does what it did.
_ARGUMENTS = "        # Parse args\n        spec_info: EagleDraftInput = forward_batch.spec_info\n"
_THEN = "        if forward_batch"
WORKER = (
    "srt/speculative/eagle_worker_v2.py",
    _ARGUMENTS + _THEN,
    _ARGUMENTS + "        self = self\n" + _THEN,
)
WORKER_NAME = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward"
