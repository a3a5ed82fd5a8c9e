"""Draw tokens in many engines at once and ask whether they have the target's distribution (distribution.py).

A setting's cases are spread over processes, each with one engine, and go on for as long as was asked. Faults can be planted, to
see that the counts would tell.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import msgspec
from msgspec import Struct

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import EagletwinError, HarnessError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Limits, Mode
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import resolve

from ..common import ROOT, module
from .distribution import (
    SETTINGS,
    SIGNIFICANCE,
    DrawTally,
    JudgedCounts,
    count_joint,
    count_long,
    findings,
    joint_case,
    long_case,
)

_LIMITS = Limits(step=120.0, case=600.0)
_GRACE = 30.0  # seconds that a process may take for its last case
_VERIFY = "sglang.srt.speculative.eagle_utils.eagle_sample"
_PROPOSE = "sglang.srt.speculative.spec_utils.sample_draft_proposal"


def _verify(name: str, match: str, replacement: str) -> Patch:
    return Patch(name=f"planted-{name}", edits=(Edit(target=_VERIFY, match=match, replacement=replacement),))


# What the counts must find. The last two are faults of rejection sampling, and of no other.
FAULTS = {
    # the target's temperature is a little off
    "warmer": _verify(
        "warmer",
        "sampling_info.temperatures, verify_input.draft_token_num, dim=0",
        "sampling_info.temperatures * 1.05, verify_input.draft_token_num, dim=0",
    ),
    # the coin that refused the root's children draws the bonus token as well
    "one-coin": _verify(
        "one-coin",
        "uniform_samples_for_final_sampling=coins_for_final_sampling",
        "uniform_samples_for_final_sampling=coins[:, 0].contiguous()",
    ),
    # drafts are drawn at temperature 1, and verified with the q of their own temperature
    "other-q": Patch(
        name="planted-other-q",
        edits=(
            Edit(
                target=_PROPOSE,
                match="fast_sample(probs, num_samples=1)",
                replacement="fast_sample(torch.softmax(next_token_logits, dim=-1), num_samples=1)",
            ),
        ),
        otherwise=(  # 0.5.23
            Edit(
                target=_PROPOSE,
                match="fast_sample(\n        probs,",
                replacement="fast_sample(\n        torch.softmax(next_token_logits.float(), dim=-1),",
            ),
        ),
    ),
    # each draft is verified with the q of the one before
    "shifted-q": _verify("shifted-q", "verify_input.draft_probs\n", "verify_input.draft_probs.roll(1, 1)\n"),
}


class Row(Struct, frozen=True, kw_only=True):
    """One set of counts. chance: that counts are as far off as these or farther, where all is right."""

    what: str
    samples: int
    statistic: float
    freedom: int
    chance: float


class SettingResult(Struct, frozen=True, kw_only=True):
    """The result of a setting. limit: a smaller chance is a divergence, not an accident; impossible: emitted tokens of
    probability 0; errors: of processes that counted nothing."""

    setting: str
    fault: str
    mode: str
    requests: int
    seconds: float
    limit: float
    rows: tuple[Row, ...]
    impossible: tuple[str, ...]
    errors: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return not self.impossible and all(row.chance >= self.limit for row in self.rows)

    @property
    def tells(self) -> bool:
        """Whether there were enough draws for each way of counting, and no engine went wrong."""
        return not self.errors and all(row.freedom > 0 for row in self.rows)


class Portion(Struct, frozen=True, kw_only=True):
    """What one process is to do: cases number, number + step, .. until the seconds are over; 0 cases: no other limit."""

    setting: str
    mode: Mode
    number: int
    step: int
    seconds: float
    cases: int = 0
    fault: str = ""
    sglang: str = ""


def tell(of: Portion, processes: int, gpus: int = 1) -> SettingResult:
    """Run a setting and judge its counts; of: the first process's share. A case of a number always has the same coins."""
    begun, tally, errors = time.monotonic(), DrawTally(), list[str]()
    with tempfile.TemporaryDirectory(prefix="eagletwin-draws-") as scratch:
        running = []
        for number in range(processes):
            mode = msgspec.structs.replace(of.mode, gpu=number % gpus) if of.mode.device == "cuda" else of.mode
            one = msgspec.structs.replace(of, number=number, step=processes, mode=mode)
            folder = Path(scratch, str(number))
            folder.mkdir()
            (folder / "share.json").write_bytes(msgspec.json.encode(one))
            command = module("tests.lab.draws.campaign", str(folder))
            running.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}))
        try:
            for number, process in enumerate(running):
                counted = _counted(Path(scratch, str(number)), process, begun + of.seconds + _GRACE)
                if isinstance(counted, DrawTally):
                    tally.merge(counted)
                else:
                    errors.append(counted)
        finally:
            for process in running:
                process.kill()
    found = findings(tally)
    return SettingResult(
        setting=of.setting,
        fault=of.fault,
        mode=of.mode.words or "CPU",
        requests=tally.requests,
        seconds=time.monotonic() - begun,
        limit=SIGNIFICANCE / (len(SETTINGS) * len(found)),
        rows=tuple(_row(finding) for finding in found),
        impossible=tuple(tally.impossible),
        errors=tuple(errors),
    )


def _counted(folder: Path, process: subprocess.Popen[bytes], until: float) -> DrawTally | str:
    """What a process has counted until then; or what went wrong, if it has counted nothing."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(until - time.monotonic(), 0))
    said, counted = folder / "error.txt", folder / "tally.json"
    if said.is_file():
        return said.read_text()
    return DrawTally.read(counted.read_bytes()) if counted.is_file() else f"a process counted nothing (status {process.poll()})"


def main() -> None:
    """One share, in the folder that is named."""
    folder = Path(sys.argv[1])
    of = msgspec.json.decode((folder / "share.json").read_bytes(), type=Portion)
    try:
        share(of, folder)
    except EagletwinError as error:
        (folder / "error.txt").write_text(str(error))
        sys.exit(1)


def share(of: Portion, folder: Path) -> DrawTally:
    """The counts of a share's cases, which one engine runs: every fifth a long one."""
    tally, setting, begun = DrawTally(), SETTINGS[of.setting], time.monotonic()
    patches = (FAULTS[of.fault],) if of.fault else ()
    with Host(source=resolve(of.sglang), mode=of.mode) as host:
        for done, number in enumerate(count(of.number, of.step)):
            if done and (time.monotonic() - begun > of.seconds or done == of.cases):
                return tally
            long = done % 5 == 4
            case = long_case(setting, number) if long else joint_case(setting, number)
            emitted = _emitted(host, case, folder / f"case-{number}", patches)
            count_long(tally, case, emitted) if long else count_joint(tally, emitted)
            tally.requests += len(emitted)
            (folder / "tally.part").write_bytes(tally.plain())
            (folder / "tally.part").replace(folder / "tally.json")
    raise AssertionError("numbers do not end")


def _emitted(host: Host, case: Case, folder: Path, patches: tuple[Patch, ...]) -> list[list[int]]:
    """The new tokens of each request, in the case's order."""
    folder.mkdir()
    trace = host.engine(case, patches).run(case, folder, _LIMITS, fresh=False)
    ending = trace.header.ending
    if ending.kind != "finished":
        raise HarnessError(
            f"case {case.name} {ending.kind}: {ending.detail}",
            consequence="the distribution is not judged",
            remedy="run the case by itself: the engine's log says more",
        )
    shutil.rmtree(folder)
    found = {
        record.request: trace.integers(number, "tokens")
        for number, record in enumerate(trace.header.records)
        if record.stage == "finished"
    }
    return [found[request.id][: request.max_new_tokens] for request in case.requests]


def _row(finding: JudgedCounts) -> Row:
    agreement = finding.agreement
    return Row(
        what=finding.what,
        samples=agreement.samples,
        statistic=round(agreement.statistic, 2),
        freedom=agreement.freedom,
        chance=agreement.chance,
    )


def lines(result: SettingResult) -> list[str]:
    """For people."""
    fault = f", with {result.fault}" if result.fault else ""
    head = f"{result.setting}{fault} ({result.mode}): {result.requests} requests, {result.seconds:.0f} s"
    body = [
        f"  {row.what}: {row.samples} draws, chi-square {row.statistic} of {row.freedom}, p {row.chance:.2g}"
        for row in result.rows
    ]
    wrong = [f"  impossible: {one}" for one in result.impossible[:10]]
    word = "DOES NOT AGREE" if not result.agrees else "agrees" if result.tells else "cannot tell"
    wrong += [f"  {error}" for error in result.errors[:3]]
    return [head, *body, *wrong, f"  {word} (limit of p: {result.limit:.1g})"]


def record(result: SettingResult, folder: Path) -> None:
    with (folder / "draws.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    main()
