"""The properties of the kernel tier, a file a subject. docs/explanation/kernels.md has a row for each function."""

from ..tier import Property
from . import cache_locs, commit, deepseek_v4, kv_indices, kv_move, rotate, sampling, select, tree, two_ways, verify

FILES = (tree, verify, sampling, select, cache_locs, kv_indices, commit, kv_move, rotate, two_ways, deepseek_v4)
ALL: tuple[Property, ...] = tuple(of for file in FILES for of in file.PROPERTIES)
FUNCTIONS: dict[str, list[Property]] = {
    target: [of for of in ALL if target in of.functions] for target in dict.fromkeys(t for of in ALL for t in of.functions)
}
"""Dotted name of each function of SGLang, as 0.5.23 calls it -> the properties about it."""
