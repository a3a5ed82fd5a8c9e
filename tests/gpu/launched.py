"""SGLang's own `python -m sglang.launch_server` as a process: what is planted in it, when it answers, how it ends."""

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from importlib.metadata import entry_points
from pathlib import Path

import msgspec

from eagletwin.harness.core.patch import Patch

# launch_server has no option for a patch: a plugin of SGLang's framework applies it before the scheduler is built. Rows are
# compared in float32, which SGLang's kernels of norms and activations do not know: its own code in torch takes their place.
PLUGIN = """
import os, sys, threading, time
from pathlib import Path


def start():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, hook in (("EAGLETWIN_FLOAT32", float32), ("EAGLETWIN_PLANT", plant)):
        if os.environ.get(name):
            HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", hook, HookType.BEFORE)


def float32(*args, **kwargs):
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm

    for layer in (RMSNorm, SiluAndMul):
        layer.forward_cuda = layer.forward_native


def plant(*args, **kwargs):
    from eagletwin.harness.core.patch import read_patch
    from eagletwin.harness.engines.inside import patches

    patches.apply(read_patch(Path(os.environ["EAGLETWIN_PLANT"])))

    def tell():
        while not patches.ran:
            time.sleep(0.1)
        print("; ".join(sorted(patches.ran)), "ran, as patched", file=sys.stderr, flush=True)

    threading.Thread(target=tell, daemon=True).start()
"""
START_SECONDS, END_SECONDS = 240, 20.0


def write_plugin(folder: Path) -> None:
    """A distribution whose entry point SGLang's framework finds; and that of eagletwin, where only its sources are there."""
    meta = folder / "planted-1.dist-info"
    meta.mkdir(parents=True, exist_ok=True)
    (folder / "planted_plugin.py").write_text(PLUGIN)
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    lines = ["[sglang.srt.plugins]", "planted = planted_plugin:start"]
    if not any(one.name == "eagletwin" for one in entry_points(group="sglang.srt.plugins")):
        lines.append("eagletwin = eagletwin.harness.engines.sglang.recording.plugin:start")
    (meta / "entry_points.txt").write_text("\n".join(lines) + "\n")


def environment(plugin: Path, *, float32: bool, patch: Patch | None, folder: Path) -> dict[str, str]:
    """Of a server that finds the plugin. float32: its own code in torch takes the place of kernels that do not know float32,
    and Triton rounds no factor to TF32. A patch is written into the folder."""
    paths = [str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])]
    named = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if float32:
        named |= {"EAGLETWIN_FLOAT32": "1", "TRITON_F32_DEFAULT": "ieee"}
    if patch is not None:
        file = folder / "patch.json"
        file.write_bytes(msgspec.json.encode(patch))
        named["EAGLETWIN_PLANT"] = str(file)
    return named


def until_ready(process: subprocess.Popen[bytes], port: int) -> str:
    """ "" when it answers; else why it never will."""
    for _ in range(2 * START_SECONDS):
        if process.poll() is not None:
            return f"did not start: {process.returncode}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return ""
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return f"did not answer within {START_SECONDS} s"


def end(process: subprocess.Popen[bytes]) -> None:
    """The server, and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(END_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
