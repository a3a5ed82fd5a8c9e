"""The wheels of a list of pins, for the Python of a GPU host: downloaded once through pip, by their digests, and kept.

A wheel that is in the cache is not downloaded again, so a download that broke off goes on where it was.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.files import cache_folder

# pip takes a wheel of one of these tags, and knows no "or older"
_PLATFORMS = (
    *(f"manylinux_2_{number}_x86_64" for number in (*range(39, 16, -1), 12, 5)),
    *(f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")),
)


def requirements(lock: Path) -> dict[str, tuple[str, ...]]:
    """name==version -> sha256 of the files that may serve it."""
    lines = (line.split() for line in lock.read_text(encoding="utf-8").replace("\\\n", "").splitlines())
    return {pin: tuple(word.removeprefix("--hash=sha256:") for word in hashes) for pin, *hashes in lines}


def wheel(requirement: str, digests: tuple[str, ...], python: str) -> Path:
    """The wheel of name==version for this Python on Linux. HarnessError where pip has no file of these digests."""
    name, _, version = requirement.partition("==")
    kept = cache_folder("wheels")
    pattern = f"{re.sub('[-.]', '_', name)}-{version}-*.whl"
    for found in kept.glob(pattern):
        if _runs_on(found, python) and digest(found) in digests:
            return found
    with tempfile.TemporaryDirectory(dir=kept) as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(f"{requirement} {' '.join(f'--hash=sha256:{one}' for one in digests)}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
        command += ["--require-hashes", "--implementation", "cp", "--dest", scratch, "--requirement", str(wanted)]
        command += ["--python-version", python]
        command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
        if subprocess.run(command, check=False).returncode != 0:
            raise HarnessError(
                f"pip cannot download {requirement} for Python {python}",
                consequence="the bundle was not packed",
                remedy=f"look at pip's own message, or put the wheel into {kept}",
            )
        [found] = Path(scratch).glob("*.whl")
        return found.replace(kept / found.name)


def digest(file: Path) -> str:
    """sha256 of a file."""
    total = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def _runs_on(file: Path, python: str) -> bool:
    """Whether a wheel's tags fit: its own Python or any, or the stable interface of an older one."""
    tag, interface = file.stem.split("-")[-3:-1]
    own = "cp" + python.replace(".", "")
    if interface == "abi3":
        return int(tag.removeprefix("cp3").split(".")[0]) <= int(own.removeprefix("cp3"))
    return own in tag.split(".") or tag.startswith("py")
