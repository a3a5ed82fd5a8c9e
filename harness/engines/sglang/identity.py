"""Which SGLang this process has imported, and what traces call it.

`sglang.__version__` is the installed package's, whatever was imported, where a source tree has no metadata of its own.
"""

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


def version() -> str:
    """The release, or the commit of a source tree."""
    import sglang

    return _version or str(sglang.__version__)
