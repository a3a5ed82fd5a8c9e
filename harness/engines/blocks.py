"""The blocks of a Python source: the bodies of its functions and branches. `gpu run --blocks` of tests/lab lists which ran."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

# An environment variable: the folder that gets a file for each process, of the blocks that ran. Without it nothing is noted.
FOLDER = "EAGLETWIN_BLOCKS"
# Another one: what is noted, packages and modules by their names with a comma between them; and each file tells what the
# last case of its process ran, and not what building the engine did. Without it all that ran in SPECULATIVE.
OF = "EAGLETWIN_BLOCKS_OF"
SPECULATIVE = "sglang.srt.speculative"


class Block(NamedTuple):
    """line: of its first statement. function: where it is, by its qualified name. branch: what leads into it; empty: a call."""

    line: int
    function: str
    branch: str


def blocks_of(tree: ast.AST, function: str = "", *, kernels: bool = False) -> Iterator[tuple[Block, list[ast.stmt], bool]]:
    """The blocks of a module, each with its statements, and whether a docstring is the first of them. kernels: also of
    functions that Triton compiles."""
    for node in ast.iter_child_nodes(tree):
        inside, documented = function, False
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if _compiled_elsewhere(node) and not kernels:
                continue
            inside = f"{function}.{node.name}".lstrip(".")
            documented = ast.get_docstring(node, clean=False) is not None
        for branch, body in _bodies(node):
            yield Block(body[0].lineno, inside, branch), body, documented
        yield from blocks_of(node, inside, kernels=kernels)


def _bodies(node: ast.AST) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The bodies of a statement that may run or not, each with what leads into it."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield "", node.body
        case ast.If():
            condition = ast.unparse(node.test)
            yield f"if {condition}", node.body
            if node.orelse and not (len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)):
                yield f"not ({condition})", node.orelse
        case ast.For() | ast.AsyncFor():
            yield f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}", node.body
        case ast.While():
            yield f"while {ast.unparse(node.test)}", node.body
        case ast.ExceptHandler():
            yield f"except {ast.unparse(node.type) if node.type else ''}".rstrip(), node.body
        case ast.match_case():
            yield f"case {ast.unparse(node.pattern)}", node.body


def _compiled_elsewhere(node: ast.AST) -> bool:
    """Whether the function's source is compiled by Triton, which knows no such note."""
    return any("jit" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))
