"""Which SGLang this process has imported, and what traces call it.

`sglang.__version__` is the installed package's, whatever was imported, where a source tree has no metadata of its own.
"""

import importlib.metadata
from pathlib import Path

_version = ""


def confirm(version: str, root: str) -> None:
    """Take over the version that the caller names; raise ImportError if what was imported lies elsewhere than below `root`."""
    import sglang

    global _version
    where = Path(sglang.__path__[0])
    if not where.samefile(Path(root) / "sglang"):
        raise ImportError(f"asked for the sglang in {root}, and Python imported the one in {where.parent}")
    _version = version


def confirm_installed() -> None:
    """Raise ImportError if Python imports another sglang than the installed one: traces would call it by that one's version."""
    import sglang

    try:
        installed = Path(str(importlib.metadata.distribution("sglang").locate_file("sglang")))
    except importlib.metadata.PackageNotFoundError:
        return
    where = Path(sglang.__path__[0])
    if installed.is_dir() and not where.samefile(installed):  # an editable installation has no such folder
        raise ImportError(
            f"Python imports the sglang in {where.parent}, and the installed one is in {installed.parent}: take the other off "
            f"PYTHONPATH, or name it, --sglang {where.parent}"
        )


def version() -> str:
    """The release, or the commit of a source tree."""
    import sglang

    return _version or str(sglang.__version__)
