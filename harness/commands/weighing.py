"""`eagletwin judge --target --draft`: the checkpoints of a recorded server, loaded once for each type that its ranks ran in."""

import json
from pathlib import Path

from eagletwin.harness.check.recordings import Weigh
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.recording import RecordedServer, Weighed
from eagletwin.harness.core.trace import HEADER, Trace
from eagletwin.harness.deserved.device import check_device, on
from eagletwin.harness.deserved.pair import Pair, load_served
from eagletwin.harness.deserved.recorded import started_of, weigh

from .options import let_threads_sleep


def weighing(target: str, draft: str, device: str) -> Weigh:
    """Compares a recording with these two. Raises InputError for checkpoints that are no pair."""
    check_device(device)
    let_threads_sleep()
    pairs: dict[tuple[str, str, str], Pair] = {}

    def weighed(said: RecordedServer, folder: Path, trace: Trace) -> Weighed:
        import torch

        altered = _altered(folder)
        started = started_of(said)
        with on(torch.device(device)):
            computed = started.dtype, started.quantization, started.kv_dtype  # of each launch its own
            if computed not in pairs:
                pairs[computed] = load_served(target, draft, started, device)
            return weigh(pairs[computed], trace, said, altered=altered)

    return weighed


def _altered(folder: Path) -> bool:
    """Whether the request's logits were changed. Raises InputError for a recording whose token ids are permuted."""
    said = json.loads((folder / HEADER).read_bytes())
    if said.get("private"):
        raise InputError(
            f"{folder} has permuted token ids (record --private)",
            consequence="no model can say what such a text deserves",
            remedy="leave --target and --draft out, or record without --private",
        )
    return bool(said["request"].get("altered", True))  # recordings from before this was said may have been
