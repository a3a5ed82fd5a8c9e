"""What is installed here. Light: it imports nothing that it names."""

import importlib.metadata


def installed(package: str) -> str:
    """Version of an installed package; "none" if it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
