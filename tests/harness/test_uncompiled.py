"""The decorators of torch.compile give the function back, and its compiler is loaded when something else of it is asked for."""

import os
from pathlib import Path

import pytest

from . import imported

PROGRAM = """
import sys
import torch
from eagletwin.harness.engines.sglang.boot import speedups

speedups.leave_out_dynamo([])

def double(x):
    return 2 * x

assert torch.compile(double) is double
assert torch.compile(double, dynamic=True) is double
assert torch.compile(dynamic=True)(double) is double
assert torch.compiler.disable(double) is double
assert torch.compiler.disable(recursive=False)(double) is double
assert torch._dynamo.disable(double) is double
assert torch.compile(model=double, dynamic=True) is double
assert torch.compiler.disable(fn=double) is double
assert torch._dynamo.disable(fn=double) is double
assert torch.compiler.assume_constant_result(double) is double
assert "torch._dynamo" not in sys.modules
assert not torch._dynamo.is_compiling()
assert torch._dynamo is sys.modules["torch._dynamo"]
import torch._dynamo.config
torch._dynamo.config.suppress_errors = True
assert torch.compile(double)(2) == 4
"""


SET = """
import torch
from eagletwin.harness.engines.sglang.boot import speedups

speedups.leave_out_dynamo([])
held = torch._dynamo
held.one = 1
held.two = 2
import torch._dynamo
assert (torch._dynamo.one, torch._dynamo.two) == (1, 2)
assert torch._dynamo is not held
"""


@pytest.mark.long
@pytest.mark.slow
def test_decorators_give_the_function_back_and_the_compiler_comes_when_it_is_asked_for() -> None:
    done = imported.run(["-c", PROGRAM], Path.cwd(), os.environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_what_is_set_on_the_compiler_before_it_is_loaded_is_set_on_the_compiler() -> None:
    done = imported.run(["-c", SET], Path.cwd(), os.environ)
    assert done.returncode == 0, done.stderr
