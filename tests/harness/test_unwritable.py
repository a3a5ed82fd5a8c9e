"""What is behind an exception: files that could not be written, or something else."""

import errno
import marshal

import pytest

from eagletwin.harness.core.errors import unwritable


def raised_from(error: BaseException) -> RuntimeError:
    try:
        raise RuntimeError("it did not work") from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_file_that_cannot_be_written_is_seen_behind_other_exceptions(number: int) -> None:
    error = OSError(number, "whatever", "/a/file")
    assert unwritable(error).endswith(" (/a/file)")
    assert unwritable(raised_from(raised_from(error))) == unwritable(error)


def test_bytecode_of_which_a_part_was_written_is_seen() -> None:
    with pytest.raises(EOFError) as found:
        marshal.loads(marshal.dumps((1, 2, 3))[:-2])
    assert "bytecode is cut short" in unwritable(found.value)


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone"), RuntimeError("x"), EOFError("gone"), None])
def test_other_exceptions_are_not_the_disk(error: BaseException | None) -> None:
    assert unwritable(error) == ""
