"""What the environment of an engine's processes changes in the packages that it imports."""

import subprocess
import sys

from eagletwin.harness.core.run_spec import CPU
from eagletwin.harness.engines.source import INSTALLED
from eagletwin.harness.engines.start import _environment

# A build of torch for CUDA, on a host with a driver: that one starts where torch counts the devices of CUDA's runtime.
_ASKED = """
import torch
def starts_the_driver():
    raise SystemExit("CUDA's driver was started")
torch.cuda._is_compiled = lambda: True
torch._C._cuda_getDeviceCount = starts_the_driver
torch.cuda._device_count_nvml = lambda: len(torch.cuda._parse_visible_devices())
print(torch.cuda.is_available())
"""


def test_an_engine_on_a_cpu_leaves_cudas_driver_alone() -> None:
    """A fork of a process that started it once ended in cuInit on an H200, with driver 580.159."""
    environment = _environment(INSTALLED, CPU)
    asked = subprocess.run([sys.executable, "-c", _ASKED], env=environment, capture_output=True, text=True, timeout=120)
    assert (asked.stdout, asked.stderr) == ("False\n", "")
