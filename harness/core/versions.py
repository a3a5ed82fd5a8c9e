"""What is installed here. Light: it imports nothing that it names."""

import importlib.metadata

ABSENT = "none"


def installed(package: str) -> str:
    """Version of an installed package; ABSENT if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT
