"""A full disk, or a limit on the size of files, is the machine's fault: a harness error, which says nothing of SGLang."""

from pathlib import Path

import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.errors import HarnessError, Unwritable
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.host import Host

FULL = "raise OSError(28, 'No space left on device', '/somewhere/file')"
DRAFT = Edit(
    target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
    match="topk_index = torch.argmax(",
    replacement=f"{FULL}\ntopk_index = torch.argmax(",
)
BUILD = Edit(
    target="sglang.srt.managers.scheduler.Scheduler.__init__",
    match="self.forward_ct: int = 0",
    replacement=f"""try:
    {FULL}
except OSError as error:
    raise RuntimeError("it does not start") from error""",
)
CASE = LEDGER["25015"].case


def test_a_worker_that_cannot_write_did_not_crash(host: Host, tmp_path: Path) -> None:
    engine = host.engine(CASE, (Patch(name="full", edits=(DRAFT,)),))
    with pytest.raises(HarnessError, match="a file could not be written, since the disk or a quota is full"):
        engine.run(CASE, tmp_path)


def test_an_engine_that_cannot_write_while_it_is_built_says_nothing_of_sglang(host: Host) -> None:
    with pytest.raises(Unwritable, match=r"no space is left on the disk \(/somewhere/file\)\n.*nothing is known of SGLang"):
        host.engine(CASE, (Patch(name="full", edits=(BUILD,)),))
