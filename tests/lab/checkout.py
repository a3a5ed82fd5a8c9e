"""Processes of the laboratory: it is no part of the package, and is found from the root of the checkout alone."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def module(name: str, *words: str) -> list[str]:
    """The command that runs a module of the laboratory. Its current folder must be ROOT."""
    return [sys.executable, "-m", name, *words]
