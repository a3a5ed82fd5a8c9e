"""How the judge computes in a process that is not its own, such as the test suite of a user."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_lock = threading.Lock()
_threads_before: list[int] = []  # of each judge that is at work, how many threads there were before the first


@contextmanager
def quiet_arithmetic() -> Iterator[None]:
    """torch computes in this thread alone and keeps no graph (what autograd keeps of a view costs as much as the view); numpy
    does not warn of what is not finite, since it is compared."""
    with _one_thread(), torch.inference_mode(), np.errstate(all="ignore"):
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """A case's tensors are so small that other threads gain nothing, and where there are fewer cores than threads, as in a
    container or with pytest -n, their waiting for each other took 500 ms of a case instead of 6."""
    with _lock:  # another thread may be judging: what it set is not what was there before
        threads = _threads_before[0] if _threads_before else torch.get_num_threads()
        _threads_before.append(threads)
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            torch.set_num_threads(_threads_before.pop())
