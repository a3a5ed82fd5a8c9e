"""Whether docs/guide/upstream/test_eagle_draft_chain.py does what it is for: green on a release, red where a fix is undone.

The file lies in a tree of SGLang as SGLang's own tests do, and is run as SGLang's runner runs one: `python3 FILE`. `make
upstream-test` does so in an environment of its own, in which SGLang was installed with all that it pins, and eagletwin's wheel
beside it; test_upstream.py asks the cheap half of it in the test suite.
"""

import importlib.util
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.files import installed_version

from .undo import UNDONE, make_tree, name_of_test, undo

ROOT = Path(__file__).parents[2]
TEST = ROOT / "docs" / "guide" / "upstream" / "test_eagle_draft_chain.py"
# What the guide promises for the whole file, of processor time: it hardly works on two things at once, so an idle machine takes
# about as long, and a busy one changes nothing.
SECONDS = 60
_LONGEST = 1800  # a hanging run must end


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of the file in a tree.

    seconds  on the clock; cpu: of processor time
    failed   names of its tests; errors: those that failed otherwise than by an assertion
    """

    code: int
    seconds: float
    cpu: float
    ran: int
    failed: tuple[str, ...]
    errors: tuple[str, ...]
    output: str

    @property
    def green(self) -> bool:
        return self.code == 0 and self.ran > 0 and not self.failed and not self.errors

    def red_by(self, test: str) -> bool:
        return self.code == 1 and test in self.failed and not self.errors


def attempt(tree: Path, file: Path, *tests: str) -> Attempt:
    """Run the file, or some of its tests, with the SGLang of the tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EAGLETWIN_", "SGLANG_", "PYTEST_"))}
    paths = [str(tree / "python"), *filter(None, [kept.get("PYTHONPATH", "")])]
    # SGLang's CI installs the tree as an editable package; a path before all others makes the same files the imported ones.
    environment = kept | {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_IS_IN_CI": "true"}
    begun, used = time.monotonic(), _cpu()
    done = subprocess.run(
        [sys.executable, str(file), *(f"TestEagleDraftChain.{test}" for test in tests)],
        cwd=tree / "test",
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LONGEST,
        check=False,
    )
    seconds = time.monotonic() - begun
    ran = re.search(r"^Ran (\d+) test", done.stderr, re.MULTILINE)
    failed, errors = (tuple(re.findall(rf"^{word}: (\w+)", done.stderr, re.MULTILINE)) for word in ("FAIL", "ERROR"))
    return Attempt(
        done.returncode, seconds, _cpu() - used, int(ran[1]) if ran else 0, failed, errors, done.stdout + done.stderr
    )


def _cpu() -> float:
    """Processor time of the children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def package() -> Path:
    """The installed `sglang/`."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise HarnessError("sglang is not installed", consequence="no tree was made", remedy="make upstream-test")
    return Path(spec.origin).parent


def main() -> int:
    """The release, and a tree without each of the fixes; 0 if all came out as they must."""
    versions = ", ".join(f"{name} {installed_version(name)}" for name in ("sglang", "torch", "triton", "transformers"))
    print(f"Python {sys.version.split()[0]}, {versions}", flush=True)
    wrong = 0
    for bug in ("", *UNDONE):
        with tempfile.TemporaryDirectory(prefix="eagletwin-") as place:
            tree = Path(place)
            file = make_tree(package(), tree, TEST)
            diff = undo(tree, bug) if bug else ""
            done = attempt(tree, file)
        right = done.red_by(name_of_test(bug)) if bug else done.green and done.cpu <= SECONDS
        wrong += not right
        print(_line(bug, done, right), flush=True)
        if not right:
            print(f"{diff}\n{done.output[-6000:]}", flush=True)
    return 1 if wrong else 0


def _line(bug: str, done: Attempt, right: bool) -> str:
    what = f"{bug} undone" if bug else "as released"
    colour = "green" if done.green else "red"
    failed = f"  {', '.join((*done.failed, *done.errors))}" if done.failed or done.errors else ""
    took = f"{done.seconds:5.1f} s, {done.cpu:.1f} s of CPU"
    return f"{'' if right else 'WRONG  '}{what:22} {colour:5} {took}, {done.ran} tests{failed}"


if __name__ == "__main__":
    sys.exit(main())
