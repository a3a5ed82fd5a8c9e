"""Draw tokens in many engines at once and ask whether they have the target's distribution (harness/distribution.py).

A setting's cases are spread over processes, each with one engine; they are forked from this one, which never touches a GPU.
Faults can be planted, to see that the counts would tell.
"""

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from eagletwin.harness.case import Case
from eagletwin.harness.distribution import (
    SETTINGS,
    SIGNIFICANCE,
    Finding,
    Setting,
    Tally,
    count_joint,
    count_long,
    findings,
    joint_case,
    long_case,
)
from eagletwin.harness.engines.mode import Mode
from eagletwin.harness.engines.process import Host, Limits
from eagletwin.harness.engines.source import INSTALLED, Source
from eagletwin.harness.errors import EagletwinError, HarnessError
from eagletwin.harness.patch import Edit, Patch

_LIMITS = Limits(step=120.0, case=600.0)
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


class Told(Struct, frozen=True, kw_only=True):
    """What a setting came to. limit: a chance below it is no accident; impossible: tokens that have no chance at all."""

    setting: str
    fault: str
    mode: str
    requests: int
    seconds: float
    limit: float
    rows: tuple[Row, ...]
    impossible: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return not self.impossible and all(row.chance >= self.limit for row in self.rows)


def tell(
    setting: Setting, mode: Mode, cases: int, processes: int, gpus: int = 1, fault: str = "", source: Source = INSTALLED
) -> Told:
    """Run a setting's cases 0.. and judge their counts; a case always has the same coins. Raises what an engine raises."""
    begun = time.monotonic()
    patches = (FAULTS[fault],) if fault else ()
    size = -(-cases // processes)
    shares = [range(start, min(start + size, cases)) for start in range(0, cases, size)]
    tally = Tally()
    with ProcessPoolExecutor(len(shares), mp_context=multiprocessing.get_context("fork")) as pool:
        running = [
            pool.submit(_share, setting, _on(mode, number % gpus), numbers, patches, source)
            for number, numbers in enumerate(shares)
        ]
        for future in running:
            told = future.result()
            if isinstance(told, str):
                raise HarnessError(told, consequence="the distribution cannot be told", remedy="see what the engine said")
            tally.merge(told)
    found = findings(tally)
    return Told(
        setting=setting.name,
        fault=fault,
        mode=mode.words or "CPU",
        requests=tally.requests,
        seconds=time.monotonic() - begun,
        limit=SIGNIFICANCE / (len(SETTINGS) * len(found)),
        rows=tuple(_row(finding) for finding in found),
        impossible=tuple(tally.impossible),
    )


def _share(setting: Setting, mode: Mode, numbers: range, patches: tuple[Patch, ...], source: Source) -> Tally | str:
    """`share`, or what went wrong: an exception of ours does not travel between processes."""
    try:
        return share(setting, mode, numbers, patches, source)
    except EagletwinError as error:
        return str(error)


def share(setting: Setting, mode: Mode, numbers: range, patches: tuple[Patch, ...] = (), source: Source = INSTALLED) -> Tally:
    """The counts of the cases of these numbers, which one engine runs: every fifth a long one."""
    tally = Tally()
    with Host(source=source, mode=mode) as host, tempfile.TemporaryDirectory(prefix="eagletwin-distribution-") as scratch:
        for number in numbers:
            case = long_case(setting, number) if number % 5 == 4 else joint_case(setting, number)
            folder = Path(scratch, str(number))
            folder.mkdir()
            emitted = _emitted(host, case, folder, patches)
            count_long(tally, case, emitted) if number % 5 == 4 else count_joint(tally, emitted)
            tally.requests += len(emitted)
    return tally


def _emitted(host: Host, case: Case, folder: Path, patches: tuple[Patch, ...]) -> list[list[int]]:
    """The new tokens of each request, in the case's order."""
    trace = host.engine(case, patches).run(case, folder, _LIMITS, fresh=False)
    ending = trace.header.ending
    if ending.kind != "finished":
        raise HarnessError(
            f"case {case.name} {ending.kind}: {ending.detail}",
            consequence="the distribution cannot be told",
            remedy="run the case by itself: the engine's log says more",
        )
    found = {
        record.request: trace.integers(number, "tokens")
        for number, record in enumerate(trace.header.records)
        if record.stage == "finished"
    }
    return [found[request.id][: request.max_new_tokens] for request in case.requests]


def _on(mode: Mode, gpu: int) -> Mode:
    return msgspec.structs.replace(mode, gpu=gpu) if mode.device == "cuda" else mode


def _row(finding: Finding) -> Row:
    agreement = finding.agreement
    return Row(
        what=finding.what,
        samples=agreement.samples,
        statistic=round(agreement.statistic, 2),
        freedom=agreement.freedom,
        chance=agreement.chance,
    )


def lines(told: Told) -> list[str]:
    """For people."""
    fault = f", with {told.fault}" if told.fault else ""
    head = f"{told.setting}{fault} ({told.mode}): {told.requests} requests, {told.seconds:.0f} s"
    body = [
        f"  {row.what}: {row.samples} draws, chi-square {row.statistic} of {row.freedom}, p {row.chance:.2g}"
        for row in told.rows
    ]
    wrong = [f"  impossible: {one}" for one in told.impossible[:10]]
    return [head, *body, *wrong, f"  {'agrees' if told.agrees else 'DOES NOT AGREE'} (limit of p: {told.limit:.1g})"]


def record(told: Told, folder: Path) -> None:
    with (folder / "draws.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(told) + b"\n")
