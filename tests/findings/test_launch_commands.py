"""Reports name flags of the installed SGLang, in its spelling, and their launch commands give each a value that it takes."""

import ast
import json
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from eagletwin.harness.core.run_spec import ENGINES

from ..upstream.attempt import package
from .attempt import REPORT, engine_of, folders, root_of

READ = {"int": int, "float": float}
OPTIONAL = re.compile(r"Optional\[(.*)\]$")
BLOCK = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LAUNCH = "-m sglang.launch_server "


class Flag(NamedTuple):
    """type: as SGLang writes it, without Optional. choices: those that its sources list by name or value; else empty."""

    type: str
    choices: tuple[object, ...] = ()

    def refuses(self, values: list[str]) -> str:
        if self.type == "bool":
            return "takes no value" if values else ""
        if not values or (len(values) > 1 and "ist[" not in self.type):
            return f"takes one value, not {len(values)}"
        try:
            wrong = [value for value in map(READ.get(self.type, str), values) if self.choices and value not in self.choices]
        except ValueError:
            return f"takes {self.type}, not {values[0]}"
        return f"{wrong[0]} is none of {self.choices}" if wrong else ""


@dataclass
class Sources:
    """Flags as SGLang's sources define them, which are read and not imported."""

    flags: dict[str, Flag]
    variables: str  # the text of environ.py

    def wrong(self, command: str) -> list[str]:
        """Each flag and each variable of a launch command that SGLang does not have, or that it gives a wrong value."""
        before, _, after = command.replace("\\\n", " ").partition(LAUNCH)
        found = [name for name in re.findall(r"\b(SGLANG_\w+)=", before) if f"\n    {name} = Env" not in self.variables]
        for part in re.split(r"\s(?=--)", after):
            flag, *values = shlex.split(part)
            why = self.flags[flag].refuses(values) if flag in self.flags else "is no flag"
            found += [f"{flag}: {why}"] if why else []
        return found


def listed(node: ast.expr | None, named: dict[str, ast.expr]) -> tuple[object, ...]:
    """A list of literals, also by its name or in a call such as set(...); nothing if it is computed."""
    if isinstance(node, ast.Name) and node.id in named:
        return listed(named[node.id], named)
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return listed(node.args[0], named)
    if isinstance(node, ast.List | ast.Set | ast.Tuple):
        return tuple(ast.literal_eval(node))
    return ()


def fields(module: ast.Module, named: dict[str, ast.expr]) -> dict[str, Flag]:
    """`name: A[type, "help"]` and `name: A[type, Arg(help=..., choices=..., ...)]`."""
    flags: dict[str, Flag] = {}
    for node in ast.walk(module):
        match node:
            case ast.AnnAssign(
                target=ast.Name(id=name),
                annotation=ast.Subscript(value=ast.Name(id="A"), slice=ast.Tuple(elts=[kind, told, *_])),
            ):
                more = {one.arg: one.value for one in told.keywords} if isinstance(told, ast.Call) else {}
                text = OPTIONAL.sub(r"\1", ast.unparse(kind))
                choices = listed(more.get("choices"), named)
                if text.startswith("Literal["):
                    choices = choices or tuple(ast.literal_eval(f"({text[8:-1]},)"))
                if "no_cli" not in more:
                    own = more.get("cli_name", ast.Constant("--" + name.replace("_", "-")))
                    flags |= dict.fromkeys([ast.literal_eval(own), *listed(more.get("aliases"), named)], Flag(text, choices))
    return flags


def arguments(module: ast.Module, named: dict[str, ast.expr]) -> dict[str, Flag]:
    """`parser.add_argument("--name", ...)`."""
    flags: dict[str, Flag] = {}
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str(name))], keywords=more):
                parts = {one.arg: one.value for one in more}
                text = ast.unparse(parts.get("type", ast.Name("str")))
                if "storetrue" in ast.unparse(parts.get("action", ast.Name("none"))).replace("_", "").lower():
                    text = "bool"
                flags[name] = Flag(text, listed(parts.get("choices"), named))
    return flags


@cache
def sources() -> Sources:
    srt = package() / "srt"

    def parsed(file: Path) -> ast.Module:
        return ast.parse(file.read_text(encoding="utf-8"))

    server = parsed(srt / "server_args.py")
    named = {
        node.targets[0].id: node.value
        for module in (parsed(srt / "arg_groups/choices.py"), server)
        for node in ast.walk(module)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    flags = arguments(server, named)
    for file in sorted((srt / "arg_groups/fields").glob("*.py")):
        flags |= fields(parsed(file), named)
    return Sources(flags, (srt / "environ.py").read_text(encoding="utf-8"))


OF_ENGINE = {engine: [one for one in folders() if engine_of(one / REPORT) == engine] for engine in ENGINES}


@pytest.mark.parametrize("folder", OF_ENGINE["vllm"], ids=lambda folder: folder.name)
def test_flags_of_a_report_are_vllm_s(folder: Path) -> None:
    """Those of its sources, and keys of --speculative-config that its configuration has."""
    report, _, _ = (folder / REPORT).read_text(encoding="utf-8").partition("\n## Patch\n")
    root = root_of("vllm") / "vllm"
    known = set(re.findall(r'"(--[a-z][\w-]+)"', (root / "engine/arg_utils.py").read_text(encoding="utf-8")))
    assert len(known) > 100
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", report)) <= known
    keys = re.findall(r"^    (\w+): ", (root / "config/speculative.py").read_text(encoding="utf-8"), re.MULTILINE)
    given = [json.loads(text) for text in re.findall(r"--speculative-config '(.*?)'", report)]
    assert given
    assert {key for one in given for key in one} <= set(keys)


@pytest.mark.parametrize("folder", OF_ENGINE["sglang"], ids=lambda folder: folder.name)
def test_flags_of_a_report_are_sglang_s(folder: Path) -> None:
    report, _, _ = (folder / REPORT).read_text(encoding="utf-8").partition("\n## Patch\n")
    commands = [block for block in BLOCK.findall(report) if LAUNCH in block]
    assert [wrong for command in commands for wrong in sources().wrong(command)] == []
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", report)) <= sources().flags.keys()
    assert commands or "No public " in report


def test_a_command_that_sglang_would_refuse_is_found() -> None:
    command = "SGLANG_ENABLE_PP_SPEC=1 SGLANG_NONE=1 python -m sglang.launch_server --model-path a/b --tp 2 \\\n --pp-size two"
    command += " --attention-backend fa9 --enable-lora yes --page-size --sampling-backend pytorch --disable-cuda-graph"
    command += " --cuda-graph-backend-prefill breakable --lora-paths a=B c=D --dtype float31"
    choices = {flag: sources().flags[flag].choices for flag in ("--attention-backend", "--dtype")}
    assert "fa3" in choices["--attention-backend"]
    assert sources().wrong(command) == [
        "SGLANG_NONE",
        "--tp: is no flag",
        "--pp-size: takes int, not two",
        f"--attention-backend: fa9 is none of {choices['--attention-backend']}",
        "--enable-lora: takes no value",
        "--page-size: takes one value, not 0",
        f"--dtype: float31 is none of {choices['--dtype']}",
    ]
    assert "pytorch" in sources().flags["--sampling-backend"].choices
    assert sources().flags["--cuda-graph-backend-prefill"].choices == ("full", "breakable", "disabled")
    assert len(sources().flags) > 300
