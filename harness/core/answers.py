"""What a trace says of a request's answer in numbers: why it ended."""

from enum import IntEnum


class Finish(IntEnum):
    """The kinds of a finish reason. Integers, as all numbers of a record are."""

    LENGTH = 0
    STOP = 1
    ABORT = 2
    OTHER = 3
