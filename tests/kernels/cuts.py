"""What several tests of kernels share: properties as tests, and cuts of distributions."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.harness.commands.kernels.properties import properties_of
from eagletwin.harness.commands.kernels.runtime import plant_fault
from eagletwin.harness.commands.kernels.tier import Property
from eagletwin.harness.core.patch import Edit
from eagletwin.reference.sampling import keep_top_k, keep_top_p

# The two tests that each file of properties has: each property holds, and each planted fault is caught by it.


def make_tests(file: ModuleType) -> tuple[Callable[..., None], Callable[..., None]]:
    """(test_property, test_planted_fault_is_caught) of a file's properties."""
    properties = properties_of(file)
    faults = [(of, fault) for of in properties for fault in of.faults]
    names = [f"{fault.target.rpartition('.')[2]}-{number}" for number, (_, fault) in enumerate(faults)]

    @pytest.mark.parametrize("of", properties, ids=lambda of: of.name)
    def test_property(of: Property, config: settings) -> None:
        of.check(config)

    @pytest.mark.parametrize(("of", "fault"), faults, ids=names)
    def test_planted_fault_is_caught(of: Property, fault: Edit, config: settings) -> None:
        with plant_fault(fault):
            case = of.failing(config)
        assert case is not None, f"{of.name}: nothing failed with {fault.match!r} as {fault.replacement!r}"
        of.holds(case)

    return test_property, test_planted_fault_is_caught


# Distributions to be cut by top_k and top_p, for whatever cuts them: sgl_kernel's C++, or the engine's stand-in for it.

Cut = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Rows:
    """Distributions with equal entries among them, as whole numbers of a common unit; limits lie between two sums of theirs."""

    counts: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]  # per row; for top_k as they are

    @property
    def chances(self) -> Tensor:
        weights = torch.tensor(self.counts, dtype=torch.float64, device="cpu")
        return (weights / weights.sum(-1, keepdim=True)).float()

    @property
    def top_k(self) -> Tensor:
        return torch.tensor(self.cuts, dtype=torch.int32, device="cpu")

    @property
    def top_p(self) -> Tensor:
        """[rows] float32: half way between a sum of whole units and the next; 1 where the cut is 0."""
        units = [sum(row) for row in self.counts]
        limits = [(of % total + 0.5) / total if of else 1.0 for of, total in zip(self.cuts, units, strict=True)]
        return torch.tensor(limits, dtype=torch.float32, device="cpu")


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    vocabulary = draw(st.sampled_from([3, 4, 5, 17, 96, 1000, 4097]))
    count, seed = draw(st.integers(1, 4)), draw(st.integers(0, 2**16))
    generator = torch.Generator("cpu").manual_seed(seed)
    counts = torch.randint(0, draw(st.sampled_from([2, 5, 50])), (count, vocabulary), generator=generator, device="cpu")
    counts[:, seed % vocabulary] += 1  # never nothing
    cuts = tuple(draw(st.integers(0, vocabulary + 2)) for _ in range(count))
    return Rows(tuple(tuple(row) for row in counts.tolist()), cuts)


def same(found: Tensor, expected: Tensor) -> None:
    """The same tokens are kept, with the same chances."""
    assert (found.cpu() > 0).tolist() == (expected > 0).tolist()
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-9)


def largest_are_kept(case: Rows, cut: Cut) -> None:
    kept, here = case.top_k.clamp(min=1), torch.get_default_device()
    same(cut(case.chances.to(here), kept.to(here)), keep_top_k(case.chances.double(), kept.long()))


def mass_is_kept(case: Rows, cut: Cut) -> None:
    limits, here = case.top_p, torch.get_default_device()
    same(cut(case.chances.to(here), limits.to(here)), keep_top_p(case.chances.double(), limits.double()))
