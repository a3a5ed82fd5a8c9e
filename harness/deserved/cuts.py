"""Where the chunks of a prompt may have ended, as far as it decides what a draft of several layers is fed.

Layer k of a row consumes the token k+1 places on. Where a chunk ends nearer to the prompt's end than the draft has layers, its
last rows look ahead of the prompt: at drafts, which stay (last_fed.py).
"""

from itertools import chain, combinations

from .sending import Way

Cuts = tuple[int, ...]  # in rising order; () where a prompt was read at once
ONCE: tuple[Cuts, ...] = ((),)  # the one way in which it can have been


def possible_cuts(way: Way, size: int, chunk: int | None, layers: int) -> tuple[Cuts, ...]:
    """Each way in which a prompt of `size` tokens may have been read, the likeliest first.

    chunk: tokens that the server prefills at once; 0, None: any number. layers: that propose something; one is fed none.
    By itself, a prompt is cut at each full chunk, and its rows are there when it comes again. Together with others, the rest of
    a chunk that others began is as long as arrivals had it, and nobody tells.
    """
    near = range(max(size - layers + 1, 1), size)
    if layers < 2 or not chunk or not near:
        return ONCE
    if way != "together":
        return (tuple(cut for cut in near if cut % chunk == 0),)
    return tuple(chain.from_iterable(combinations(near, number) for number in range(len(near) + 1)))
