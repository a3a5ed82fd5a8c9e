"""Imports that are made once, before processes are forked that would each make them."""

import importlib
from collections.abc import Iterable


def import_early(names: Iterable[str], shims: list[str]) -> None:
    """Import these modules. One that is not there, or needs one that is not, is for the process to report that needs it.

    Any other failure is listed among the shims: a second import of what was imported by half may not raise."""
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except Exception as error:
            failed = f"{name}: failed when it was imported before the fork: {type(error).__name__}: {error}"
            if failed not in shims:
                shims.append(failed)
