"""SGLang 0.5.10 to 0.5.21 registers image processors while it is imported; a transformers without torchvision refuses.

Seen on the transformers that these releases pin, 5.3.0 to 5.12.1. No case has an image: what is registered is never looked up.
"""

from typing import Any

from ..stand_ins.stubs import StubCalled

_NAME = "AutoImageProcessor"


def install(shims: list[str]) -> None:
    """Let registrations through where transformers offers only a placeholder that raises. Call it before SGLang is imported."""
    from transformers.utils import import_utils

    original = import_utils._LazyModule.__getattr__
    placeholder = _Placeholder(_NAME, (), {"shims": shims})

    def attribute(module: Any, name: str) -> Any:
        # transformers makes its own module object twice: an attribute of the first would be lost
        if name == _NAME and name in getattr(module, "_object_missing_backend", ()):
            return placeholder
        return original(module, name)

    import_utils._LazyModule.__getattr__ = attribute


class _Placeholder(type):
    """Class of the stand-in. It takes registrations, says so once, and has nothing else."""

    shims: list[str]

    def register(cls, *_args: object, **_kwargs: object) -> None:
        shim = f"transformers.{_NAME}.register: does nothing"
        if shim not in cls.shims:
            cls.shims.append(shim)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StubCalled(f"transformers.{_NAME}.{name} was asked for, and there is no torchvision here")
