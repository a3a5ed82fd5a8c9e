"""`eagletwin info`: what can run here; the known bugs, rules, releases and models."""

import json
from typing import Annotated, Any

import typer

from eagletwin.cases.entry import Entry, Known
from eagletwin.harness.core.errors import EXIT_EQUAL, InputError
from eagletwin.harness.core.terminal import count, each, fold, width

from .doctor import doctor
from .options import flag, option, run_options
from .result import ReleaseFacts, ReleasesFacts, emit_result, with_json

info = typer.Typer(add_completion=False, help="What can run here; the known bugs, rules, releases and models.")
releases = typer.Typer(add_completion=False, help="The published releases of SGLang.")
info.add_typer(releases, name="releases")
info.command()(doctor)
AS_JSON = option("", "as_json", bool, False, "", "--json")("As JSON, for programs.")
LEDGER_OPTIONS = (
    flag("", "live")("Only bugs that no release has fixed."),
    option("", "release", str, "", "RELEASE", "--in")("Only bugs of this release."),
    AS_JSON,
)


@info.command()
@run_options(LEDGER_OPTIONS)
def ledger(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]…", help="These entries alone, with all that is known.")
    ] = None,
    *,
    live: bool,
    release: str,
    as_json: bool,
) -> int:
    """List the known bugs: id, releases that have it, what a run needs for it to matter."""
    from eagletwin.cases.ledger import with_probes

    chosen = [entry for entry in with_probes(ids or ["all"]) if not (live and entry.fixed)]
    if release:
        [known] = named_releases([release])
        chosen = [entry for entry in chosen if entry.is_in(known)]
    if as_json:
        print(json.dumps([facts(entry) for entry in chosen], indent=1))
        return EXIT_EQUAL
    for entry in chosen:
        print(full_text(entry) if ids else short_text(entry))
    print(f"\n{count(len(chosen), 'bug')}; `eagletwin info ledger ID` says more of one, `eagletwin prove ID` proves it.")
    return EXIT_EQUAL


def facts(entry: Known) -> dict[str, Any]:
    """All that is known of it, for programs."""
    found: dict[str, Any] = {
        "id": entry.id,
        "title": entry.title,
        "rule": entry.rule,
        "buggy": entry.buggy,
        "fixed": entry.fixed,
        "live": not entry.fixed,
        "last_bad": entry.last_bad,
        "hidden": entry.hidden,
        "matters_with": entry.trigger,
    }
    if isinstance(entry, Entry):
        sides = {"revert": entry.revert, "remedy": entry.remedy, "view": entry.view}
        found["told_apart_by"] = next(name for name, part in sides.items() if part is not None)
        found["needs"] = entry.needs.options if entry.needs is not None else ""
    else:
        found["told_apart_by"] = "call"
        found["needs"] = ""  # a call of one function needs no mode
    return found


def short_text(entry: Known) -> str:
    return f"{entry.id:26} {entry.state:24} {entry.rule:20} {entry.title}"


def full_text(entry: Known) -> str:
    """The entry, and what to type."""
    lines = [f"{entry.id}: {entry.title}", f"  releases      {entry.state}", f"  breaks        {entry.rule}"]
    lines.append(f"  matters with  {entry.trigger}")
    if not isinstance(entry, Entry):
        return "\n".join([*lines, f"  try           {entry.command}", ""])
    needs = f" {entry.needs.options}" if entry.needs is not None else ""
    lines += [f"  try           {entry.command(entry.red)}{needs}", f"                eagletwin prove {entry.id}{needs}", ""]
    return "\n".join(lines)


@info.command()
@run_options((AS_JSON,))
def rules(*, as_json: bool) -> int:
    """List the rules: what must hold, and whether a rule needs the model's weights."""
    from eagletwin.harness.judge.rules import catalogue, rules_json

    if as_json:
        print(rules_json().decode())
        return EXIT_EQUAL
    for name, rule in catalogue().items():
        print(f"{name}  (design {rule.section}; weights: {rule.weights})")
        print("\n".join(fold(rule.sentence, width())))
        for of, says in (("a multi-layer draft", rule.of_layers), ("a plain language model", rule.of_plain)):
            if says is not None:
                print("\n".join(fold(f"Of {of}: {says.sentence}", width())))
    return EXIT_EQUAL


@info.command()
@run_options((AS_JSON,))
def models(*, as_json: bool) -> int:
    """List the model recipes: tiny, synthetic target / draft pairs, one family a block."""
    from eagletwin.harness.families import FAMILIES

    facts = [
        {
            "family": family.name,
            "stores": family.stored,
            "limits": list(family.limits),
            "recipes": [
                {
                    "name": recipe.name,
                    "algorithm": recipe.algorithm,
                    "target_layers": recipe.target.num_layers,
                    "vocabulary": recipe.target.vocab_size,
                    "draft_vocabulary": recipe.draft_vocab_size or recipe.target.vocab_size,
                    "draft_layers": recipe.mtp_layers or 1,
                    "chained": recipe.chained,
                    "target_hidden": recipe.target_hidden,
                    "max_position": recipe.max_position,
                    "window": recipe.window,
                }
                for recipe in family.recipes
            ],
        }
        for family in FAMILIES.values()
    ]
    if as_json:
        print(json.dumps(facts, indent=1))
        return EXIT_EQUAL
    for family in FAMILIES.values():
        print(f"{family.name}{': ' if family.limits else ''}{', '.join(family.limits)}")
        for recipe in family.recipes:
            layers = f", {recipe.mtp_layers} draft layers{', chained' if recipe.chained else ''}" if recipe.mtp_layers else ""
            reduced = f", draft vocabulary {recipe.draft_vocab_size}" if recipe.draft_vocab_size else ""
            target = f"target of {count(recipe.target.num_layers, 'layer')}, vocabulary {recipe.target.vocab_size}"
            print(f"  {recipe.name:18} {recipe.algorithm:7} {target}{reduced}{layers}")
    print(
        "\nThe weights are made from a seed. A case names a recipe as its `model`, and no other checkpoint."
        "\nOf your own checkpoint `eagletwin acceptance` says what it deserves, `eagletwin record` what a server does with it."
    )
    return EXIT_EQUAL


@releases.command("list")
@with_json
def releases_list() -> int:
    """List the releases that `--sglang` accepts, and which of them are in the cache. Fetches nothing."""
    from eagletwin.harness.engines.provision import releases as known
    from eagletwin.harness.engines.source import here

    there = here()
    for name in known():
        print(f"{name:14} {'here' if name in there else 'to be fetched'}")
    emit_result(ReleasesFacts(releases=[ReleaseFacts(name=name, here=name in there) for name in known()]))
    return EXIT_EQUAL


@releases.command("fetch")
@with_json
def releases_fetch(
    names: Annotated[list[str] | None, typer.Argument(metavar="RELEASE…", help="Releases; without any, all of them.")] = None,
) -> int:
    """Fetch releases, and the packages that they pin, into the cache: for work without a network."""
    from eagletwin.harness.engines.source import resolve

    fetched = []
    for name in each(named_releases(names), "releases", str):
        paths = [str(path) for path in resolve(name).paths]
        fetched.append(ReleaseFacts(name=name, here=True, paths=paths))
        print(f"{name:14} {', '.join(paths) or 'installed'}", flush=True)
    emit_result(ReleasesFacts(releases=fetched))
    return EXIT_EQUAL


def named_releases(names: list[str] | None) -> list[str]:
    """The releases of these names; all of them if no name is given. Raises InputError for an unknown release."""
    from eagletwin.harness.engines.provision import releases as known

    for name in names or ():
        if name not in known():
            raise InputError(
                f"{name!r} is not a known release", consequence="nothing was done", remedy=f"use some of {', '.join(known())}"
            )
    return [name for name in known() if name in names] if names else list(known())
