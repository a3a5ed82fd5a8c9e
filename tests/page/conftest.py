"""One browser for all tests of pages. A fixture that modules import is one for each of them, and two cannot run at once."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Chromium, driven by Playwright: pages are tested as people see them. Tests are skipped by name where either is absent.

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser; its pages are opened by `opened`."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no browser: Playwright is not installed", exc_type=ImportError
    )
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page of a file. said: what it wrote to the console, or raised; asked: whatever it wanted to load besides itself."""

    def __init__(self, browser: Any, file: Path, *, width: int = 1200, dark: bool = False) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light")
        self.page = context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    @property
    def overflows(self) -> bool:
        """Whether the page itself, and not a table in it, must be scrolled sideways."""
        wide: bool = self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        return wide

    def quiet(self) -> None:
        """It wrote nothing, raised nothing, and loaded nothing but itself."""
        assert self.said == []
        assert len(self.asked) == 1, self.asked


def serious(opened: Opened) -> list[str]:
    """What axe finds that keeps people from reading the page. Its program is put in past the page's own policy."""
    axe = pytest.importorskip("axe_playwright_python", reason="no browser: axe is not installed")
    program = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    opened.page.evaluate(program)
    found = opened.page.evaluate("axe.run()")
    return [
        f"{one['id']}: {one['help']} ({one['nodes'][0]['html'][:120]})"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
