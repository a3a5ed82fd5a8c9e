"""The base that a job compares its SGLang with: a release, a folder, or a revision of the same checkout."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagletwin.harness.core.environment import installed
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.engines.provision import releases

from ..bisect.worktree import Worktree, commit_of, git


@contextmanager
def base_of_job(base: str, sglang: str) -> Iterator[str]:
    """The base as `--sglang` takes it. A revision lies in a worktree of its own until the job is over. Raises InputError."""
    if base in ("", installed("sglang"), *releases()) or Path(base).is_dir():
        yield base
        return
    if not Path(sglang).is_dir():
        raise InputError(
            f"--base {base} is neither a release nor a folder, and --sglang names no checkout that has it",
            consequence="nothing was run",
            remedy="name a release or a folder, or give --sglang a checkout and --base a revision of it",
        )
    checkout = Path(sglang).resolve()
    repository = Path(git(checkout, "rev-parse", "--show-toplevel"))
    with Worktree(repository, commit_of(repository, base)) as tree:
        yield str(tree.path / checkout.relative_to(repository))
