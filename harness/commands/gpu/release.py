"""The release that a plan is for."""

from packaging.version import InvalidVersion, Version

from eagletwin.harness.core.environment import ABSENT, installed
from eagletwin.harness.core.errors import InputError


def release_of(typed: str) -> str:
    """The release that was typed, or the installed one. Raises InputError if that is none."""
    release = typed or installed("sglang")
    if release == ABSENT:
        raise InputError(
            "SGLang is not installed here", consequence="no plan was written", remedy="name the host's release with --sglang"
        )
    try:
        return str(Version(release))
    except InvalidVersion as error:
        raise InputError(
            f"--sglang {release}: it is the version of no release",
            consequence="no plan was written",
            remedy="name one, as 0.5.23: a plan goes by the bugs that it has",
        ) from error
