"""In what two SGLangs differ: by content, from both sides, and whatever git says of either."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from eagletwin.harness.check.trials import base_of
from eagletwin.harness.commands.compare.numbers import _doubts
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.differs import Differs, Watch
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.run_spec import DEFAULT_RUN
from eagletwin.harness.core.trace import Trace, new_header
from eagletwin.harness.engines import source
from eagletwin.harness.engines.source import INSTALLED, Source, TooMany, as_change, between, resolve
from eagletwin.harness.engines.start import Zygote

from .test_source import commit, git

BASE = "def same(): return 1\ndef changed(): return 1\ndef gone(): return 1\n"
NEW = "def same(): return 1\ndef changed(): return 2\ndef added(): return 1\n"


def tree(root: Path, **files: str) -> Path:
    (root / "sglang").mkdir(parents=True)
    for name, text in {"__init__": "", **files}.items():
        (root / "sglang" / f"{name}.py").write_text(text)
    return root


def source_at(root: Path) -> Source:
    return resolve(str(root))


def test_each_is_told_what_it_has_otherwise_than_the_other(tmp_path: Path) -> None:
    base, branch = tree(tmp_path / "base", m=BASE), tree(tmp_path / "branch", m=BASE)
    commit(branch)
    (branch / "sglang" / "m.py").write_text(NEW)
    git(branch, "commit", "-qam", "the change")  # to git, nothing is changed
    assert source_at(branch).difference is None
    found = between(source_at(base), source_at(branch))
    assert found is not None
    left, right = (watch.differs for watch in found)
    assert (left.functions, left.removed) == (("sglang.m.changed", "sglang.m.gone"), ("sglang.m.added",))
    assert (right.functions, right.removed) == (("sglang.m.changed", "sglang.m.added"), ("sglang.m.gone",))
    assert (left.base, right.base) == (source_at(branch).version, source_at(base).version)


def test_a_branch_is_a_change_of_the_base_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, branch = tree(tmp_path / "base", m=BASE), tree(tmp_path / "branch", m=NEW)
    commit(branch)
    found = as_change(source_at(branch), str(base))
    assert found.difference is not None
    assert found.base == source_at(base)
    assert found.difference.watch.differs.functions == ("sglang.m.changed", "sglang.m.added")
    assert "+def changed(): return 2" in found.difference.patch
    host: Any = SimpleNamespace(source=found, beside=lambda other: SimpleNamespace(source=other))
    beside = base_of(host, DEFAULT_RUN)  # what is wrong without the change as well is not the change's
    assert beside is not None
    assert beside.run.sglang == str(base)
    assert as_change(source_at(branch), "") == source_at(branch)
    same = as_change(source_at(branch), str(branch)).difference
    assert same is not None
    assert same.watch.differs == Differs(base=source_at(branch).called)
    monkeypatch.setattr(source, "MOST", 0)
    far = as_change(source_at(branch), str(base))
    assert (far.difference, far.base) == (None, source_at(base))


def test_copies_do_not_differ_and_releases_differ_in_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (source_at(tree(tmp_path / name, m=BASE, n=BASE)) for name in "ab")
    assert between(one, other) is None
    (tmp_path / "b" / "sglang" / "m.py").write_text(NEW)
    monkeypatch.setattr(source, "MOST", 0)
    with pytest.raises(TooMany, match="they differ in 1 files"):
        between(one, other)


@pytest.mark.slow
def test_the_installed_one_can_be_watched_too(tmp_path: Path) -> None:
    """What was changed in it is nothing, and in what it differs from another is not."""
    with Zygote(INSTALLED) as plain, Zygote(INSTALLED, watch=Watch(Differs(base="1"), {})) as watched:
        assert plain._named() == []
        watched._scratch = str(tmp_path / "scratch")
        (tmp_path / "scratch").mkdir()
        assert watched._named() == [INSTALLED.called, str(INSTALLED.root), str(tmp_path / "scratch" / "changes.json")]


F, G, M = ("m.f",), ("m.g",), ("m",)
# Of two SGLangs whose traces are the same: in what each differs, and whether that says anything about the difference.
SAYS = {
    "the function ran on both": (Differs(base="2", functions=F, ran=F), Differs(base="1", functions=F, ran=F), True),
    "it ran on neither": (Differs(base="2", functions=F), Differs(base="1", functions=F), False),
    "one of two functions ran, on one": (Differs(base="2", functions=F + G, ran=G), Differs(base="1", functions=F), True),
    "a function was added and did not run": (
        Differs(base="2", removed=F, modules=M, imported=M),
        Differs(base="1", functions=F, modules=M, imported=M),
        False,
    ),
    "a constant that no function of its module reads": (
        Differs(base="2", modules=M, imported=M),
        Differs(base="1", modules=M, imported=M),
        False,
    ),
    "a kernel in C++ that one has": (Differs(base="2"), Differs(base="1", files=("a.cu",)), False),
    "comments": (Differs(base="2"), Differs(base="1"), True),
    "each by itself, and one ran nothing": (Differs(base="0", functions=F, ran=F), Differs(base="0", functions=G), False),
}


@pytest.mark.parametrize("what", SAYS)
def test_that_two_traces_are_the_same_says_something_if_a_difference_ran(what: str) -> None:
    *each, says = SAYS[what]
    traces = [trace(version, differs) for version, differs in zip("12", each, strict=True)]
    assert (not _doubts(traces)) == says


def trace(version: str, differs: Differs) -> Trace:
    case = Case(name="x", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
    engine = EngineInfo(name="none", version=version, device="cpu", kernels="none", torch="0", triton="0")
    header = new_header(case, "", engine, Ending(kind="finished"), ())
    return Trace(replace(header, differs=differs), {})
