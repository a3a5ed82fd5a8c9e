"""What is printed as `again:` names the run that was: typed, it becomes the same RunSpec, whatever the options were."""

import runpy
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from eagletwin import door
from eagletwin.cases.ledger import LEDGER, entries_of
from eagletwin.harness.check import repro
from eagletwin.harness.cli.main import command_tree
from eagletwin.harness.commands import options as shared_options
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.options import spec_of
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.judge.rules import catalogue, rules_off

COMMANDS: Any = command_tree()

FOLDERS = ("", "0.5.22", "/tmp/a tree/sglang", "it's", "$HOME", "tree;ls")
SECONDS = st.one_of(
    st.sampled_from([0.1, 120.0, 900.0, 1234567.0, 0.30000000000000004, 1e-1, 1e22]),
    st.floats(0.1, 1e9, allow_nan=False),
)
REVERTED = sorted(entry.id for entry in LEDGER.values() if entry.revert is not None)
REMEDIED = sorted(entry.id for entry in LEDGER.values() if entry.remedy is not None)
OFF = sorted(rule for rule in catalogue() if not rule.startswith(("engine.", "kernel.")))


def typed(option: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[str]]:
    """The option with a value, or nothing."""
    return st.one_of(st.just([]), values.map(lambda value: [option, str(value)]))


def repeated(option: str, values: list[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(values), max_size=2).map(lambda few: [word for one in few for word in (option, one)])


CHANGES = (repeated("--revert", REVERTED), repeated("--remedy", REMEDIED))
JUDGING = (repeated("--without", OFF), typed("--view", st.sampled_from(["slot_layout", "true_tree", "last_fed", "committed"])))
SOURCE = (typed("--sglang", st.sampled_from(FOLDERS)),)
KERNELS = (typed("--kernels", st.sampled_from(["fast", "interpreter", "shadow", "checked"])),)
HOW = (
    *KERNELS,
    typed("--device", st.sampled_from(["cpu", "cuda"])),
    typed("--graphs", st.sampled_from(["none", "1", "1,2,4", "3,8"])),
    typed("--prefill-graphs", st.sampled_from(["none", "16", "16,64,256"])),
    st.sampled_from([[], ["--overlap"], ["--no-overlap"]]),
    typed("--tp", st.sampled_from([1, 2])),
    typed("--dtype", st.sampled_from(["float32", "bfloat16"])),
    typed("--attention", st.sampled_from(["triton", "fa3", "flashinfer", "flashmla"])),
)
LIMITS = (typed("--step-timeout", SECONDS), typed("--case-timeout", SECONDS))
REPEAT = (typed("--repeat", st.integers(1, 99)),)
SEARCH = (
    typed("--minutes", st.floats(0.01, 1e7)),
    typed("--cases", st.integers(1, 10**7)),
    typed("--seed", st.integers(0, 10**20)),
    typed("--findings", st.integers(0, 9)),
    typed("--shrink-minutes", st.floats(0, 1e7)),
    repeated("--only", ["llama-tiny", "mimo_v2", "topk=3", "context-length=8", "updates=disk", "trees,layers", "rejection"]),
    repeated("--not", ["sampling", "small-trees"]),
)


def words_of(groups: tuple[st.SearchStrategy[list[str]], ...]) -> st.SearchStrategy[list[str]]:
    return st.tuples(*groups).map(lambda parts: [word for part in parts for word in part])


def parsed(words: list[str]) -> dict[str, Any]:
    """The values of a command's parameters, as the command line reads these words."""
    command = COMMANDS.commands[words[0]]
    context = command.make_context(words[0], list(words[1:]), resilient_parsing=False)
    return dict(context.params)


def spec_typed(words: list[str]) -> RunSpec | None:
    """The run that these words name; None: they contradict each other, which is said before anything runs."""
    try:
        return spec_of(parsed(words))
    except InputError:
        return None


def again(spec: RunSpec, *words: object) -> list[str]:
    """What is printed, as a shell takes it apart."""
    name, *rest = shlex.split(spec.command(*words))
    assert name == "eagletwin"
    return rest


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of a GPU are read on any machine."""
    monkeypatch.setattr(shared_options, "must_have_cuda", lambda *_: None)


EVERY = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

VERBS = {
    "check": (("check", "a case.json"), (*CHANGES, *JUDGING, *REPEAT, *SOURCE, *HOW, *LIMITS)),
    "prove": (("prove", "all"), (*SOURCE, *HOW, *LIMITS)),
    "bisect": (("bisect", "25015"), (*CHANGES, *JUDGING, *SOURCE, *KERNELS, *LIMITS)),
    "compare": (("compare", "0.5.22", "0.5.23"), (*HOW, *LIMITS)),
    "judge": (("judge", "a folder"), JUDGING),
}


@pytest.mark.parametrize("verb", VERBS)
@EVERY
@given(data=st.data())
def test_the_printed_command_names_the_same_run(verb: str, data: st.DataObject) -> None:
    begin, groups = VERBS[verb]
    spec = spec_typed([*begin, *data.draw(words_of(groups))])
    if spec is None:
        return
    assert spec_typed(again(spec, *begin)) == spec


@pytest.mark.parametrize("verb", ["prove", "bisect"])
@EVERY
@given(data=st.data())
def test_a_run_of_another_command_can_be_had_again_by_check(verb: str, data: st.DataObject) -> None:
    """prove and bisect print a `check`: of a release, or of one side of a proof."""
    begin, groups = VERBS[verb]
    spec = spec_typed([*begin, *data.draw(words_of(groups))])
    if spec is None:
        return
    entry = data.draw(st.sampled_from(list(LEDGER.values())))
    for one in (replace(spec, release="0.5.11"), entry.run(entry.green, spec), entry.run(entry.red, spec)):
        assert spec_typed(again(one, "check", entry.id)) == one


def test_both_sides_of_every_entry_can_be_had_again() -> None:
    """Of one whose id begins another's too: draft-plan, and not draft-plan-flashmla beside it."""
    spec = spec_typed(["prove", "all"])
    assert spec is not None
    for entry in LEDGER.values():
        assert entries_of(entry.id) == [entry]
        for one in (entry.run(entry.green, spec), entry.run(entry.red, spec)):
            assert spec_typed(again(one, "check", entry.id)) == one


@EVERY
@given(words=words_of((*SEARCH, *CHANGES, *JUDGING, *SOURCE, *HOW, *LIMITS)))
def test_a_search_can_be_had_again(words: list[str]) -> None:
    options = search_typed(["fuzz", *words])
    if options is not None:
        assert search_typed(shlex.split(options.command)[1:]) == options


def search_typed(words: list[str]) -> SearchOptions | None:
    """The search that these words name; None: they contradict each other."""
    given = parsed(words)
    spec = spec_typed(words)
    own = {name: given[name] for name in SearchOptions.__dataclass_fields__ if name in given}
    return None if spec is None else SearchOptions(**own, run=spec)


@EVERY
@given(words=words_of(VERBS["check"][1]))
def test_a_script_has_the_run_that_it_was_made_from(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All but its SGLang, which the script names otherwise, and how its changes were typed, as it holds the patches."""
    spec = spec_typed(["check", "25015", *words])
    if spec is None:
        return
    ran: list[RunSpec] = []
    monkeypatch.setattr(repro, "_reproduce", lambda case, sglang, tree, run: ran.append(run) or 0)
    monkeypatch.setattr(door, "reproduce", repro.reproduce)
    with tempfile.TemporaryDirectory() as folder:
        script = repro.write_script(Path(folder), LEDGER["25015"].case, spec, command="")
        with pytest.raises(SystemExit):
            runpy.run_path(str(script), run_name="__main__")
    assert ran == [replace(spec, release="", changes=())]


def test_rules_in_a_run_are_those_that_can_be_switched_off() -> None:
    assert rules_off(OFF) == frozenset(OFF)


def test_a_script_has_what_the_case_showed_and_its_workarounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    remedies = [entry.remedy for entry in LEDGER.values() if entry.remedy is not None]
    for spec in (RunSpec(finding="draft.positions (draft.decode)"), RunSpec(finding="it's", workarounds=tuple(remedies[:2]))):
        ran: list[RunSpec] = []
        monkeypatch.setattr(repro, "_reproduce", lambda case, sglang, tree, run, ran=ran: ran.append(run) or 0)
        monkeypatch.setattr(door, "reproduce", repro.reproduce)
        script = repro.write_script(tmp_path, LEDGER["25015"].case, spec, command="")
        with pytest.raises(SystemExit):
            runpy.run_path(str(script), run_name="__main__")
        assert ran == [spec]
