"""torch.compile where it is turned off: its decorators give the function back, and torch's compiler stays out of the process.

TORCHDYNAMO_DISABLE has the same effect, but the decorators then import some 700 modules: a sixth of a start, and memory that
every fork copies.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.compiler


def install(shims: list[str]) -> None:
    """Before SGLang and transformers are imported, in a process that was started with TORCHDYNAMO_DISABLE."""
    torch.compile = torch.compiler.disable = _given_back  # type: ignore[assignment]
    torch.compiler.assume_constant_result = _given_back  # type: ignore[assignment]
    if "_dynamo" not in vars(torch):  # torch imports it when it is first asked for; so does this, but for the decorator
        torch._dynamo = _Unloaded()  # type: ignore[assignment]
    given_back = "torch.compile, torch.compiler.disable, torch.compiler.assume_constant_result, torch._dynamo.disable"
    shims.append(f"{given_back}: give the function back")


def _given_back(function: Callable[..., Any] | None = None, *_: Any, **named: Any) -> Any:
    for name in ("model", "fn"):  # what torch.compile calls it, and what disable does
        function = named.get(name, function)
    return _given_back if function is None else function


class _Unloaded:
    """torch._dynamo until anything else in it is asked for. An import of it, or of a part of it, puts it in this place."""

    disable = staticmethod(_given_back)

    def __getattr__(self, name: str) -> Any:
        if torch.__dict__.get("_dynamo") is self:
            del torch._dynamo
        import torch._dynamo as loaded

        return getattr(loaded, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__getattr__("__name__")  # what is set here would be lost once it is loaded
        setattr(sys.modules["torch._dynamo"], name, value)
