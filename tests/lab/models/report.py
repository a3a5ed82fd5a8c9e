"""models.md: the ledger in every model, made of recorded answers alone."""

from collections import Counter
from collections.abc import Iterator, Sequence

from eagletwin.cases.entry import Entry
from eagletwin.cases.reach import CASES
from eagletwin.harness.commands.prove.report import reason
from eagletwin.harness.core.terminal import count
from eagletwin.harness.families import FAMILIES

from ..common import shared_rows, shorter
from .survey import FILE, NOT_ASKED, InModel, ModelCell

PAGE = "models.md"
_REFUSED = "SGLang does not run this configuration"  # as engines/host.py says it, and then why


def page(found: Sequence[InModel], entries: Sequence[Entry]) -> str:
    """The page, in Markdown."""
    legend = _Legend()
    table = [
        "| entry | breaks | in models |",
        "|---|---|---|",
        *shared_rows([(entry, _by_word([(legend.word(entry, one), one.model) for one in found])) for entry in entries]),
    ]
    return "\n".join([*_head(found, entries), *table, "", *legend.lines(), *_tail()]) + "\n"


def _by_word(cells: Sequence[tuple[str, str]]) -> str:
    """What holds in which models. The word of most of them comes last, and stands for all that are not named."""
    models = dict[str, list[str]]()
    for word, model in cells:
        models.setdefault(word, []).append(model)
    most = max(models, key=lambda word: len(models[word]))
    named = [f"{word} {', '.join(_families(those))}" for word, those in models.items() if word != most or len(models) == 1]
    return "; ".join([*named, *([f"all else {most}"] if len(models) > 1 else [])])


def _families(models: Sequence[str]) -> list[str]:
    """These models; the name of a family in place of several that are all of it."""
    whole = {
        recipe.name: name
        for name, family in FAMILIES.items()
        if len(family.recipes) > 1 and all(recipe.name in models for recipe in family.recipes)
        for recipe in family.recipes
    }
    return [*dict.fromkeys(whole.get(model, model) for model in models)]


def open_cells(found: Sequence[InModel], entries: Sequence[Entry]) -> list[str]:
    """Cells of which nothing is known, or that show nothing for a reason that nobody knows."""
    return [f"{entry.id} in {one.model}" for one in found for entry in entries if _is_open(entry, one)]


def _is_open(entry: Entry, one: InModel) -> bool:
    answer = one.answers.get(entry.id)
    return answer is None or (answer.status in ("not shown", "not run") and not _why(entry, one.model, answer))


def _why(entry: Entry, model: str, answer: ModelCell) -> str:
    """Why it is not proven; empty: nobody knows."""
    if answer.status == "cannot be" or answer.why in NOT_ASKED or answer.why.startswith(_REFUSED):
        return answer.why
    if answer.idle:
        return f"SGLang's worker for this draft never calls {', '.join(name.rsplit('.', 1)[-1] for name in answer.idle)}"
    return reason(entry.id, model)


def _head(found: Sequence[InModel], entries: Sequence[Entry]) -> list[str]:
    counts = Counter(answer.status for one in found for answer in one.answers.values())
    versions = ", ".join(sorted({cell.sglang for one in found for cell in one.answers.values() if cell.sglang}))
    return [
        "# The ledger in every model",
        "",
        f"Written by `python -m tests.lab models` from {FILE}: {len(entries)} entries in {count(len(found), 'model')} on "
        f"SGLang {versions}, on a CPU. {count(counts['proven'], 'cell')} are proven.",
        "",
        "A proof is an entry's case carried over to the model: equal with the fix, diverged without it, three times alike.",
        f"Where that case does not reach the bug, other prompts and longer answers are tried, {CASES} cases at most.",
        "",
        "Entries with the same answers share a row; rules that differ come in the order of the entries.",
        "",
        "* home: the entry's own case is of this model. yes: proven by the entry's own rule.",
        "* yes with a letter: another rule is the first to break there, or another live bug is mended on both sides.",
        "* A number: not there, for the reason with that number below.",
        "* **open**: it does not show, and the reason is not known.",
        "",
        "Families: "
        + "; ".join(f"{name}: {', '.join(r.name for r in family.recipes)}" for name, family in FAMILIES.items())
        + ".",
        "",
    ]


def _tail() -> list[str]:
    return [
        "",
        "## Again",
        "",
        "```",
        "python -m tests.lab models                            # proves what is not known yet, and writes this page",
        "python -m tests.lab models deepseek-nextn --again     # one model again",
        "eagletwin prove 25015 --model deepseek-nextn        # one cell, with the whole argument",
        "```",
    ]


class _Legend:
    """Letters for how a proof differs and numbers for reasons, in the order in which they come up."""

    def __init__(self) -> None:
        self._other: dict[str, str] = {}
        self._reasons: dict[str, int] = {}

    def word(self, entry: Entry, one: InModel) -> str:
        answer = one.answers.get(entry.id)
        if entry.case.model == one.model and answer is not None and answer.status == "proven":
            return "home"
        if answer is None:
            return "(not run)"
        if answer.status == "proven":
            how = _how(entry, answer)
            return f"yes {self._other.setdefault(how, _letter(len(self._other)))}" if how else "yes"
        why = _why(entry, one.model, answer).replace(one.model, "this model")
        return str(self._reasons.setdefault(why, len(self._reasons) + 1)) if why else "**open**"

    def lines(self) -> Iterator[str]:
        for how, letter in self._other.items():
            yield f"* {letter}: {how}"
        if self._other and self._reasons:
            yield ""
        for why, number in self._reasons.items():
            yield f"{number}. {shorter(why)}"


def _how(entry: Entry, answer: ModelCell) -> str:
    parts = [f"by {answer.rule}"] if answer.rule != entry.rule else []
    parts += [f"beside the remedy of {' and '.join(answer.beside)}"] if answer.beside else []
    return ", ".join(parts)


def _letter(number: int) -> str:
    return chr(ord("a") + number)
