"""The plugin that SGLang loads in each process of a server (its entry points `sglang.srt.plugins`): one hook, if asked.

Without $EAGLETWIN_RECORD it imports nothing and changes nothing. Whatever fails here must not stop a server: SGLang logs what a
plugin raises while it is loaded, and the hook below catches everything.
"""

import os
import traceback
from typing import Any


def start() -> None:
    """Have the scheduler, when it is built in its own process, recorded."""
    if not os.environ.get("EAGLETWIN_RECORD"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", _built, HookType.AFTER)


def _built(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    try:
        from .listener import listen

        listen(scheduler)
    except Exception:
        traceback.print_exc()
        print("eagletwin: error: nothing of this server is recorded; the traceback is above. The server goes on.", flush=True)
