"""The options of `eagletwin fuzz`, as one value: options that contradict each other are refused, and every generated case
is held to the rest."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from eagletwin.cases.blocks import Asked, block_of
from eagletwin.cases.strategies import CONTEXT_LENGTHS, PAGE_SIZES, SMALL_TREE, UPDATED, VALUES
from eagletwin.harness.core.case import Ask, Case, WeightPath
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.mode import FLASHMLA_PAGE, WIDEST
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec, unusual
from eagletwin.harness.core.terminal import nearest
from eagletwin.harness.engines.source import Source, as_change, resolve
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.modes import runs_in

from .plan import Plan
from .typed import MAX_CASES, MINUTES, SHRINK_MINUTES, Sampling
from .unsearched import narrowed


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The options of a search, by their names on the command line. None or "" of those that choose cases: any.

    processes  how many run cases; 0: one a core
    run        the options that choose no cases
    unknown    ids of entries that the search is not to know: of no option, `search` of tests/lab alone sets it
    base       a release or a folder that the SGLang is a change of: of no option, as `ci` alone asks for it
    """

    minutes: float = MINUTES
    max_cases: int = MAX_CASES
    seed: int = 0
    findings: int = 1
    shrink_minutes: float = SHRINK_MINUTES
    model: str | None = None
    topk: int | None = None
    context_length: int | None = None
    small_trees: bool = False
    update_weights: WeightPath | None = None
    sampling: Sampling | None = None
    asks: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    processes: int = 0
    run: RunSpec = DEFAULT_RUN
    unknown: tuple[str, ...] = ()
    base: str = ""
    out: Path = Path("eagletwin-runs")

    def check(self) -> None:
        """Raises InputError for a value that is never drawn, and for two options that no case can have both."""
        self._check_values()
        for contradicts, options, why, remedy in self._contradictions():
            if contradicts:
                raise InputError(f"{options} contradict each other: {why}", consequence="nothing was run", remedy=remedy)
        block_of(self.seed, 0, self.asked)  # there is one

    def _check_values(self) -> None:
        known = {
            "model": (self.model, VALUES["model"]),
            "topk": (self.topk, VALUES["topk"]),
            "context-length": (self.context_length, sorted(filter(None, CONTEXT_LENGTHS))),
        }
        asked = [("ask", (ask, get_args(Ask))) for ask in self.asks]
        for name, (value, values) in [*known.items(), *asked]:
            if value is not None and value not in values:
                raise InputError(
                    f"--{name} {value}: no such case is generated",
                    consequence="nothing was run",
                    remedy=f"{nearest(value, values)}, or write the case yourself (docs/reference/case.md)",
                )

        if self.run.mode.attention == "flashmla":
            raise InputError(
                f"--attention flashmla takes pages of {FLASHMLA_PAGE}, and no generated case has more than {PAGE_SIZES[-1]}",
                consequence="nothing was run",
                remedy="use another attention backend, or write the case yourself (docs/reference/case.md) and `check` it",
            )

    def _contradictions(self) -> tuple[tuple[bool, str, str, str], ...]:
        """Whether two options contradict each other, which, why, and what to do."""
        model, layers = f"--model {self.model}", self.model is not None and RECIPES[self.model].mtp_layers > 0
        rejection, chains = self.sampling == "rejection", self.topk == 1
        no_trees = "--topk 1" if chains else "--sampling rejection" if rejection else model
        return (
            *self._contradictions_of_sampling(),
            (
                self.small_trees and (chains or rejection),
                f"--small-trees and {no_trees}",
                "a chain has as many nodes as its path",
                "leave one of them out",
            ),
            (
                self.small_trees and layers,
                f"--small-trees and {model}",
                "a multi-layer draft always has one node more than steps",
                "use a model with a single draft layer, such as llama-tiny",
            ),
            (
                self.update_weights is not None and self.model not in (None, *UPDATED),
                f"--update-weights {self.update_weights} and {model}",
                "eagletwin has no second checkpoint of it, for target and draft together",
                f"use --model {' or '.join(UPDATED)}",
            ),
            (
                self.run.view == "true_tree" and (chains or rejection),
                f"--view true_tree and {no_trees}",
                "the view is of draft trees, and all cases would be chains",
                "leave one of them out",
            ),
            (
                self.run.view == "committed" and self.model is not None and not layers,
                f"--view committed and {model}",
                "the view is of multi-layer drafts, and no case would have one",
                "give --model llama-mtp, llama-mtp-chain, mimo-v2 or step-3.5",
            ),
            (
                self.run.view == "shifted" and self.model is not None and RECIPES[self.model].reads_states,
                f"--view shifted and {model}",
                "the view is of drafts that are plain language models, and no case would have one",
                "give --model llama-standalone",
            ),
        )

    def _contradictions_of_sampling(self) -> tuple[tuple[bool, str, str, str], ...]:
        model, rejection = f"--model {self.model}", self.sampling == "rejection"
        recipe = RECIPES.get(self.model or "")
        refuses = recipe is not None and not recipe.samples_drafts
        trees, min_p = self.topk is not None and self.topk > 1, "min_p" in self.asks
        return (
            (
                rejection and trees,
                f"--sampling rejection and --topk {self.topk}",
                "SGLang has rejection sampling for chains only",
                "use --topk 1, or --sampling target",
            ),
            (
                rejection and refuses,
                f"--sampling rejection and {model}",
                "SGLang has rejection sampling for EAGLE heads with the target's vocabulary only",
                "use another model, such as llama-eagle3-full, or --sampling target",
            ),
            (
                min_p and self.sampling == "none",
                "--ask min_p and --sampling none",
                "it is of requests that sample, and none would",
                "give --sampling target",
            ),
        )

    @property
    def held(self) -> dict[str, Any]:
        """What all cases have: fields of cases.strategies.Focus."""
        chosen = {
            "model": self.model,
            "topk": self.topk,
            "tree_size": SMALL_TREE if self.small_trees else None,
            "context_length": self.context_length,
            "update_weights": self.update_weights,
        }
        return {name: value for name, value in chosen.items() if value is not None}

    @property
    def asked(self) -> Asked:
        """What all blocks of cases have."""
        mode = self.run.mode
        return Asked(
            held=self.held,
            sampling="" if self.sampling == "none" else self.sampling,
            asks=self.asks,
            wanted=self._wanted(),
            widest=WIDEST[mode.dtype],
            retract=not mode.overlap,
            overlap=mode.overlap,
            stages=mode.pp,
        )

    def _wanted(self) -> Callable[[Case], bool]:
        """Whether a block with this probe is to be searched."""
        wanted, mode = narrowed(self.only, self.left_out), self.run.mode
        return lambda probe: wanted(probe) and runs_in(probe, mode)

    @property
    def source(self) -> Source:
        """The SGLang that is searched, as a change of its base if one is named. Raises InputError, NotFetched."""
        return as_change(resolve(self.run.sglang), self.base)

    @property
    def plan(self) -> Plan:
        """The same for a search."""
        return Plan(
            seed=self.seed,
            seconds=60 * self.minutes,
            max_cases=self.max_cases,
            shrink_seconds=60 * self.shrink_minutes,
            command=self.command,
            asked=self.asked,
            unmet=self.unmet,
        )

    def unmet(self, case: Case) -> str:
        """The option that a generated case does not meet; empty: it meets all of them."""
        settings = case.engine.sglang
        ways: dict[str, Collection[tuple[bool, bool]]] = {  # whether requests sample, and whether the draft does
            "none": [(False, False)],
            "target": [(True, False)],
            "rejection": [(True, True)],
            "any": [(True, False), (True, True)],
        }
        samples = any(request.sampling is not None for request in case.requests)
        met = {
            f"--model {self.model}": self.model in (None, case.model),
            f"--topk {self.topk}": self.topk in (None, case.topk),
            f"--context-length {self.context_length}": self.context_length in (None, settings.context_length),
            "--small-trees": not self.small_trees or case.verify_nodes <= case.num_steps,
            f"--update-weights {self.update_weights}": self.update_weights in (None, settings.update_weights),
            f"--sampling {self.sampling}": self.sampling is None
            or (samples, settings.rejection_sampling) in ways[self.sampling],
        }
        return next((option for option, is_met in met.items() if not is_met), "")

    @property
    def command(self) -> str:
        """What to type to search like this again."""
        return self.run.command("fuzz", *self.words)

    @property
    def words(self) -> list[str]:
        """What to type of the options that choose cases and limit the search."""
        given = (
            ("--model", self.model, None),
            ("--topk", self.topk, None),
            ("--context-length", self.context_length, None),
            ("--update-weights", self.update_weights, None),
            ("--sampling", self.sampling, None),
            *(("--ask", ask, None) for ask in self.asks),
            ("--minutes", self.minutes, MINUTES),
            ("--cases", self.max_cases, MAX_CASES),
            ("--findings", self.findings, 1),
            ("--shrink-minutes", self.shrink_minutes, SHRINK_MINUTES),
        )
        words = [*unusual(given), *["--small-trees"] * self.small_trees]
        words += [word for name in self.only for word in ("--only", name)]
        words += [word for name in self.left_out for word in ("--not", name)]
        return ["--seed", str(self.seed), *words]
