"""The recordings of a server, judged one by one: what each rank left, and what all of it says together."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from pathlib import Path

import msgspec
from msgspec.structs import replace

from eagletwin.cases.entry import Entry, Needs
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.recording import SERVER, Inconclusive, RecordedServer, RecordingComparison
from eagletwin.harness.core.records import EngineInfo, Header, ServedModel, accept_lengths
from eagletwin.harness.core.run_spec import TITLES
from eagletwin.harness.core.terminal import count, fold
from eagletwin.harness.core.trace import HEADER, Trace, load_recording
from eagletwin.harness.core.verdict import Divergence, Verdict
from eagletwin.harness.families import RECIPES
from eagletwin.harness.judge.compare import divergence_of
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.rules import catalogue

from .argument import argue, headline
from .known import may_have

# Which bugs of the ledger a recording's divergence may be: named by what is known, as no recording can be run again.


def suspects(trace: Trace, rule: str) -> list[Entry]:
    """Bugs that the server's engine may have, which break this rule with such a draft: of layers, plain, a tree; and which are
    there on its device, in its number of stages, and of a request that samples, where it takes one."""
    header = trace.header
    served = header.served
    if not isinstance(served, ServedModel):
        return []
    return [
        entry
        for entry in LEDGER.values()
        if entry.rule == rule
        and may_have(header.engine.version, entry)
        and (RECIPES[entry.case.model].mtp_layers > 0) == (served.mtp_layers > 0)
        and RECIPES[entry.case.model].reads_states == served.states
        and (entry.case.topk == 1 or header.case.topk > 1)
        and _has_what_it_needs(header, entry)
    ]


def _has_what_it_needs(header: Header, entry: Entry) -> bool:
    engine, needs = header.engine, entry.needs or Needs()
    samples = any(request.sampling is not None for request in header.case.requests)
    return (
        needs.device in ("", engine.device)
        and needs.pp <= engine.pp
        and (samples or any(request.sampling is None for request in entry.case.requests))
    )


def _title(engine: EngineInfo) -> str:
    return TITLES.get(engine.name.removesuffix(" server"), engine.name)


def suspects_text(trace: Trace, rule: str) -> Iterator[str]:
    """The same as paragraphs."""
    engine = trace.header.engine
    title, version = _title(engine), engine.version
    found = suspects(trace, rule)
    if not found:
        yield f"Of the ledger no bug that {title} {version} may have breaks this rule with such a draft."
        return
    yield f"Of the ledger, {title} {version} may have these, which break this rule with such a draft:"
    for entry in found:
        yield f"{entry.id}: {entry.trigger}. `eagletwin prove {entry.id}` shows it, and its candidate fix."
    yield "A recording cannot be run again, so whether it is one of them is not confirmed."


# What checkpoints at hand say of a recording.
CompareRecording = Callable[[RecordedServer, Path, Trace], RecordingComparison]

_SKIPPED = {
    "over_share": "recording took more than its share of the scheduler's time",
    "at_once": "others were being recorded, or written",
    "full": "the files were as large as was asked for, or the disk was full",
    "failed": "a tap failed",
    "not_tokens_alone": "their prompts are more than tokens",
}


@dataclass(frozen=True, slots=True)
class RecordedRank:
    """One rank's folder: what it says of itself, and the folders of its recordings."""

    folder: Path
    said: RecordedServer
    recordings: list[Path]


@dataclass(frozen=True, slots=True)
class JudgedRecording:
    """A recording and its verdict."""

    folder: Path
    trace: Trace
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class LookedAt:
    """What a list says of one recording.

    tokens   that its rounds committed
    weighed  comparisons with the checkpoints by rule; None: there were none, as of one that is unknown by itself
    untold   why no draft is among them
    launch   of the server that it is of
    """

    folder: Path
    status: str
    headline: str
    rounds: int
    tokens: int
    weighed: Counter[str] | None = None
    untold: Inconclusive | None = None
    launch: str = ""


@dataclass(slots=True)
class JudgedServer:
    """All that was judged."""

    servers: list[RecordedRank]
    counts: Counter[str] = field(default_factory=Counter)  # by status
    checked: Counter[str] = field(default_factory=Counter)  # comparisons by rule
    unseen: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    cut: int = 0  # recordings that end before their request did
    weighed: Counter[str] | None = None  # those of them with the checkpoints, where they are at hand
    open: int = 0  # choices that were too close to tell by them
    strange: int = 0  # greedy tokens that are not those of the target at hand
    undecided: int = 0  # recordings whose tokens they do not decide: the request samples, or its logits are changed
    wrong: list[tuple[Path, str]] = field(default_factory=list)  # headline of each that is not equal
    without: frozenset[str] = frozenset()  # rules that were left out
    looked: list[LookedAt] = field(default_factory=list)  # all of them, each by itself
    first: JudgedRecording | None = None  # the first that diverged, else the first that is unknown

    @property
    def status(self) -> str:
        """diverged if one is; equal if all are, and there is one."""
        if self.counts["diverged"]:
            return "diverged"
        silent = any(not server.recordings for server in self.servers)  # it saw requests, and recorded none
        doubt = self.counts["unknown"] or silent or self._uncompared_launches() or not self.counts["equal"]
        return "unknown" if doubt else "equal"

    @property
    def untold(self) -> dict[Inconclusive, int]:
        """Recordings of which no draft was compared with the checkpoints, by the cause."""
        return dict(Counter(one.untold for one in self.looked if one.untold is not None).most_common())

    def _draft_counts(self) -> dict[str, int]:
        """Of each launch how much of what it drafted was compared with the checkpoints: drafts, and rows that the draft stores,
        which would be wrong where its token or its state is."""
        drafted = Counter[str]()
        for one in self.looked:
            if one.weighed is not None:
                drafted[one.launch] += one.weighed["draft.proposal"] + one.weighed["draft.kv"]
        return dict(drafted)

    def _uncompared_launches(self) -> list[str]:
        """The launches that were looked at beside their checkpoints, and of which nothing that was drafted was compared."""
        return [launch for launch, number in self._draft_counts().items() if not number]

    def report(self, columns: int, again: str) -> str:
        """For a person."""
        recordings = sum(self.counts.values())
        said = ", ".join(f"{number} {status}" for status, number in sorted(self.counts.items()) if number)
        lines = [f"{self.status.upper()}  {count(recordings, 'recorded request')}: {said or 'none'}"]
        if self.status == "unknown" and self._uncompared_launches():
            lines += ["", *(line for text in self._why_nothing() for line in fold(text, columns, "  ", "       "))]
        tokens = (self.weighed or Counter())["verify.accept"]
        if 2 * self.strange > tokens:
            is_not = "is not that" if self.strange == 1 else "are not those"
            text = f"{self.strange} of {count(tokens, 'greedy token')} {is_not} of this target: is it the server's?"
            lines += ["", *fold(text, columns)]
        for server in self.servers:
            lines += ["", *(line for text in _about(server) for line in fold(text, columns))]
        if self.first is not None:
            lines += ["", f"  {self.first.folder}"]
            argument = argue(self.first.trace.header, self.first.verdict, trace=self.first.trace, columns=columns)
            lines += [f"  {line}".rstrip() for line in argument.splitlines()]
            if self.first.verdict.status == "diverged":
                known = suspects_text(self.first.trace, self.first.verdict.rule)
                lines += ["", *(line for text in known for line in fold(text, columns))]
        if len(self.wrong) > 1:
            lines += ["", "  All that are not equal:"]
            lines += [line for folder, text in self.wrong for line in fold(f"{folder.name}: {text}", columns, "    ", "      ")]
        lines += ["", *fold(self._looked_at(), columns)]
        if self.weighed is not None:
            lines += ["", *(line for text in self.beside_checkpoints() for line in fold(text, columns))]
        if self.cut:
            lines += fold(f"{count(self.cut, 'recording')} stopped before the request did.", columns)
        if again:
            lines += ["", f"  again: {again}"]
        return "\n".join(lines)

    def _looked_at(self) -> str:
        integers = self.checked - (self.weighed or Counter())
        text = (
            f"{count(sum(integers.values()), 'comparison')} in {count(self.rounds, 'round')} by rules that need no weights"
            f"{_by_rule(integers)}."
        )
        if self.unseen:
            text += f" Not seen{_by_rule(self.unseen)}."
        never = [name for name, rule in catalogue().items() if rule.weights == "yes"]
        return f"{text} Rules that need the weights looked at nothing: {', '.join(never)}."

    def _why_nothing(self) -> Iterator[str]:
        launches, those = self._draft_counts(), self._uncompared_launches()
        of = "" if len(launches) == 1 else f" of {len(those)} of the {len(launches)} launches"
        yield f"No draft{of} was compared with the checkpoints, and no row that the draft stores."
        yield "so:  whether the server drafts what this pair deserves is not known"
        untold = dict.fromkeys(one.untold for one in self.looked if one.untold is not None and one.launch in those)
        remedies = ["leave --without out"] if self.without & {"draft.proposal", "draft.kv"} else []
        remedies += [one.remedy for one in untold]
        yield f"try: {'; or '.join(remedies) or 'record more requests: all of these are too close to tell'}"

    def beside_checkpoints(self) -> Iterator[str]:
        """Sentences on what was compared with the checkpoints, and what was not."""
        weighed, recordings = self.weighed or Counter(), count(len(self.looked), "recording")
        text = f"{count(sum(weighed.values()), 'comparison')} with the checkpoints{_by_rule(weighed)}."
        text += f" Near ties left {count(self.open, 'comparison')} of draft.proposal open."
        if not weighed["draft.kv"]:
            text += " No row was compared with them: `record --rows` keeps those of EAGLE and EAGLE-3 heads, on one rank"
            text += "; above, draft.kv compares which tokens rows had been fed." if self.checked["draft.kv"] else "."
        yield text
        if self.undecided:
            yield f"No token was compared in {self.undecided} of {recordings}: requests sample, or their logits are changed."
        for untold, number in self.untold.items():
            yield (
                f"No draft was compared in {number} of {recordings}: {untold.why}. To have drafts compared, {untold.remedy}."
            )


def _by_rule(numbers: Counter[str]) -> str:
    parts = ", ".join(f"{rule} {number}" for rule, number in sorted(numbers.items()) if number)
    return f": {parts}" if parts else ""


def is_session(folder: Path) -> bool:
    """Whether a folder is one that a server recorded into, or a rank's, or one recording of it."""
    return _is_recording(folder) or bool(_files(folder))


def _is_recording(folder: Path) -> bool:
    return (folder / HEADER).is_file() and (folder.parent / SERVER).is_file()


def _files(folder: Path) -> list[Path]:
    """What each rank of a folder, or the folder as the one rank, says of itself."""
    own = folder / SERVER
    return [own] if own.is_file() else sorted(folder.glob(f"*/{SERVER}"))


def judge_recordings(folder: Path, without: frozenset[str], weigh: CompareRecording | None = None) -> JudgedServer:
    """Judge all recordings below a folder. Raises InputError for one that cannot be read, and for a folder without any rank.

    weigh: compares a recording with its checkpoints, where they are at hand"""
    session = JudgedServer(_servers(folder), weighed=None if weigh is None else Counter(), without=without)
    by_request: dict[tuple[str, int, str], list[JudgedRecording]] = {}
    for server in session.servers:
        for recording in server.recordings:
            one = JudgedRecording(recording, trace := load_recording(recording), judge(trace, without))
            weighed = weigh(server.said, recording, trace) if weigh is not None and one.verdict.status != "unknown" else None
            if weighed is not None:
                session.undecided += not weighed.checked["verify.accept"]
                weighed = _left_of(weighed, without)
                session.open += weighed.open
                session.strange += sum(one.rule == "verify.accept" for one in weighed.divergences)
                one = JudgedRecording(recording, trace, _with(one.verdict, weighed))
            _take(session, one, weighed, server.said.launch)
            if server.said.engine.tp > 1:
                by_request.setdefault((server.said.launch, server.said.dp, trace.header.case.name), []).append(one)
    for ranks in by_request.values():
        if len({one.trace.header.engine.rank for one in ranks}) == len(ranks):  # else a client used one id for several requests
            _compare_ranks(session, ranks, without)
    return session


def _left_of(weighed: RecordingComparison, without: frozenset[str]) -> RecordingComparison:
    """What is left when these rules are left out."""
    found = [one for one in weighed.divergences if one.rule not in without]
    checked = Counter({rule: number for rule, number in weighed.checked.items() if rule not in without})
    return replaced(weighed, divergences=found, checked=checked)


def _with(verdict: Verdict, weighed: RecordingComparison) -> Verdict:
    """The verdict of the integers, and what the checkpoints say besides: what integers show came first."""
    found = [*weighed.divergences]
    verdict = replace(verdict, checked=dict(Counter(verdict.checked) + weighed.checked))
    if not found:
        return verdict
    if verdict.first is None:
        verdict = replace(verdict, status="diverged", rule=found[0].rule, first=found.pop(0))
    later = Counter(verdict.later)
    later.update(one.rule for one in found)
    return replace(verdict, later=dict(later))


def _servers(folder: Path) -> list[RecordedRank]:
    if _is_recording(folder):
        return [RecordedRank(folder.parent, _read_server(folder.parent / SERVER), [folder])]
    files = _files(folder)
    if not files:
        raise InputError(
            f"{folder} holds no recording",
            consequence="nothing was judged",
            remedy="name a folder that `eagletwin record` wrote into; its server says on stderr what it records",
        )
    return [
        RecordedRank(file.parent, _read_server(file), sorted(one.parent for one in file.parent.glob(f"*/{HEADER}")))
        for file in files
    ]


def _read_server(file: Path) -> RecordedServer:
    try:
        return msgspec.json.decode(file.read_bytes(), type=RecordedServer)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(
            f"{file} cannot be read: {error}", consequence="nothing was judged", remedy="record the server again"
        ) from error


def _take(session: JudgedServer, one: JudgedRecording, weighed: RecordingComparison | None, launch: str) -> None:
    verdict = one.verdict
    if session.weighed is not None and weighed is not None:
        session.weighed.update(weighed.checked)
    session.counts[verdict.status] += 1
    session.checked.update(verdict.checked)
    session.unseen.update(verdict.unseen)
    rounds = accept_lengths(one.trace.header.records)
    session.rounds += len(rounds)
    said = headline(one.trace.header, verdict) if verdict.status != "equal" else ""
    checked, untold = (None, None) if weighed is None else (weighed.checked, weighed.untold)
    session.looked.append(LookedAt(one.folder, verdict.status, said, len(rounds), sum(rounds), checked, untold, launch))
    session.cut += one.trace.header.ending.kind == "stopped"
    if verdict.status != "equal":
        session.wrong.append((one.folder, said))
        if session.first is None or (session.first.verdict.status != "diverged" and verdict.status == "diverged"):
            session.first = one


def _compare_ranks(session: JudgedServer, ranks: Sequence[JudgedRecording], without: frozenset[str]) -> None:
    """What is an integer must be the same on all ranks, for each request that several of them recorded."""
    if "ranks.agree" in without:
        return
    first = ranks[0]
    for other in ranks[1:]:
        session.checked["ranks.agree"] += 1
        differs = _difference(first.trace, other.trace)
        if differs is not None:
            verdict = replace(first.verdict, status="diverged", rule="ranks.agree", reason="", first=differs)
            said = headline(first.trace.header, verdict)
            session.wrong.append((other.folder, said))
            place = next(number for number, one in enumerate(session.looked) if one.folder == first.folder)
            if session.looked[place].status != "diverged":  # it may be unknown by itself, but what differs is wrong on a rank
                session.counts[session.looked[place].status] -= 1
                session.counts["diverged"] += 1
                session.looked[place] = replaced(session.looked[place], status="diverged", headline=said)
            if session.first is None or session.first.verdict.status != "diverged":
                session.first = JudgedRecording(first.folder, first.trace, verdict)
            return


def _difference(one: Trace, other: Trace) -> Divergence | None:
    """Where the records of two ranks first differ. The pool is each rank's own to count."""
    records = [
        {record.key: number for number, record in enumerate(trace.header.records) if record.request} for trace in (one, other)
    ]
    for key, number in records[0].items():
        record, twin = one.header.records[number], records[1].get(key)
        if twin is None and other.header.ending.kind == "stopped":  # this rank recorded less of it
            continue
        if twin is None:
            return _divergence_of_rank(one, number, "a record", "no such record")
        beside = other.header.records[twin]
        for name, value in record.numbers.items():
            if beside.numbers.get(name) != value:
                return _divergence_of_rank(one, number, f"{name} {value}", str(beside.numbers.get(name)))
        for name in record.tensors:
            values = one.integers(number, name)
            others = other.integers(twin, name) if name in beside.tensors else None
            if values != others:
                return _divergence_of_rank(one, number, f"{name} {values[:8]}", str(others and others[:8]))
    return None


def _divergence_of_rank(trace: Trace, number: int, expected: str, actual: str) -> Divergence:
    return divergence_of(trace.header.records[number], "ranks.agree", "rank 0 and another", expected, actual)


def _about(server: RecordedRank) -> Iterator[str]:
    said, engine = server.said, server.said.engine
    how = ", ".join(f"{name} {said.arguments[name]}" for name in _SHOWN if name in said.arguments)
    yield f"{server.folder.name}: {_title(engine)} {engine.version}, {engine.worker}, {engine.mode}; {how}."
    share = f"Recording took {100 * said.share:.2g} % of its time"
    yield f"It saw {count(said.seen, 'request')} and recorded {said.written}. {share}."
    for why, number in sorted(said.skipped.items()):
        which = "1 request that was" if number == 1 else f"{number} requests that were"
        has = "has" if number == 1 else "have"
        yield f"{which} due or under way {has} no recording: {_SKIPPED.get(why, why)}."
    if said.last_failure:
        yield f"Taps failed {count(said.failures, 'time')}; the newest: {said.last_failure}."
    if len(server.recordings) != said.written:
        yield f"{said.written} were written, and {len(server.recordings)} are judged here."


_SHOWN = (
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "page_size",
    "attention_backend",
)
