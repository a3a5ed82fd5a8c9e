"""A screenshot of a page for docs/guide/images, small enough for a repository:
`python -m tests.page.screenshot REPORT.html IMAGE.png [WIDTH [HEIGHT [dark]]]`."""

import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from .conftest import NAMES


def take(page: Path, image: Path, width: int, height: int, *, dark: bool) -> None:
    program = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        opened = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", device_scale_factor=1
        )
        opened.goto(page.resolve().as_uri())
        opened.screenshot(path=image)
        browser.close()
    # 64 colours are enough for text and frames, and make a third of the bytes
    with Image.open(image) as whole:
        whole.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(image, optimize=True)


if __name__ == "__main__":
    sizes = [int(word) for word in sys.argv[3:5]]
    take(Path(sys.argv[1]), Path(sys.argv[2]), *(sizes + [1000, 900][len(sizes) :]), dark="dark" in sys.argv[5:])
