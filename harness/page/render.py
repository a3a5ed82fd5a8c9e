"""A document as HTML, and report.html: one file that holds its style and its program, and asks no network for anything.

Case files, traces and patches come from strangers. All their texts are escaped; the page's own policy lets no other program run
than ours, by its digest, and loads nothing.
"""

import base64
import hashlib
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from eagletwin.harness.core.errors import unwritable

from .document import Document

NAME = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"
# What a string of JSON must not hold inside a <script>, as JSON writes it otherwise.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def html_of(page: Document) -> str:
    """The whole page, without what is empty on it."""
    program = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    return str(
        _environment()
        .get_template("page.html")
        .render(
            page=page.filled,
            style=(_TEMPLATES / "page.css").read_text(encoding="utf-8"),
            program=program,
            program_digest=digest,
            timeline=_json(page.timeline),
        )
    )


@cache
def _environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _json(data: object) -> str:
    """JSON that may stand inside a <script>: it holds no character that could end it."""
    text = msgspec.json.encode(data).decode()
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def write_page(folder: Path, page: Callable[[], Document]) -> Path | None:
    """Write report.html into a folder; None if it could not be made or written, which changes no verdict: stderr says why."""
    file = folder / NAME
    partial = folder / f".{NAME}.{os.getpid()}"
    try:
        partial.write_text(html_of(page()), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        why = unwritable(error) or error.strerror or str(error)
        print(f"note: {file} cannot be written ({why}); the verdict stands without it", file=sys.stderr)
        return None
    except Exception as error:
        print(
            f"note: {file} could not be made ({type(error).__name__}: {error}); the verdict stands without it\n"
            "  try: report this with the run folder: it is a bug of eagletwin",
            file=sys.stderr,
        )
        return None
    return file
