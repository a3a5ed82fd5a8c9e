"""The dimensions: a file for each thing that a case can have, with its DIMENSION, or DIMENSIONS where several share code.

All that depends on what a case can have is derived from DIMENSIONS: what a search draws, which cases are valid, the features of
`fuzz --only` and `bisect --features`, shrinking, the names for `Case.exercises`, and how known bugs are matched.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from eagletwin.harness.core.features import GENERAL

from .dimension import Dimension

# What is drawn of a request is drawn in this order, and what is drawn of a whole case after it, in reverse. Features are taken
# away in this order: what a later one does may depend on an earlier one. A file that is not in this list comes after those
# that are, in the order of names.
_ORDER = """
model requests sampling stream min_p logit_bias processor logprobs penalties hidden_states min_new_tokens grammar events session
samples adapters cache prefill adaptive plain_decode draft_window tree sizes
""".split()  # noqa: SIM905


def _all() -> Iterator[Dimension]:
    names = [module.name for module in iter_modules(__path__) if module.name != "dimension"]
    for name in sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)):
        module = import_module(f"{__name__}.{name}")
        yield from module.DIMENSIONS if hasattr(module, "DIMENSIONS") else (module.DIMENSION,)


DIMENSIONS = {dimension.name: dimension for dimension in _all()}
HAPPENED = {name: happened for dimension in DIMENSIONS.values() for name, happened in dimension.happened.items()}
# Names that `Case.exercises` may use and the judge reports
FEATURES = {**GENERAL, **{name: sentence for name, (sentence, _) in HAPPENED.items()}}
