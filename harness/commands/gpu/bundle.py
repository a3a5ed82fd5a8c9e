"""Pack eagletwin, SGLang and what both need for a GPU host without network; `. FOLDER/setup.sh` there unpacks it.

Wheels come from the package index through pip, once, and stay in the cache. Nothing of others is kept in the repository. What
no case calls is left out of SGLang and of its kernels: with it the bundle would hold 1.3 GB.
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from eagletwin.harness.core.errors import HarnessError, InputError
from eagletwin.harness.core.folders import cache_folder
from eagletwin.harness.families.weights import keep

SITE, OURS, WEIGHTS = "site.tar.xz", "eagletwin.tar.xz", "weights.tar.xz"
FLASH = "flash.tar.xz"  # only where it is asked for: FlashAttention's kernels are ten times as large as all else
SETUP, SUMS = "setup.sh", "SHA256SUMS"
_PYTHON = "3.12"
_PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in (34, 28, 27, 26, 24, 17)), "manylinux2014_x86_64", "manylinux1_x86_64")

# What the image itself must have: not packed, since they come with torch, or with anything that tests Python.
_IN_THE_IMAGE = ("numpy", "torch", "triton", "safetensors", "packaging", "typing_extensions", "typer", "rich", "hypothesis")

_FLASH_KERNELS = "flash_ops.abi3.so"

_SETUP_TEXT = f"""\
# Source this on the GPU host: `. BUNDLE/setup.sh`. It unpacks the bundle, where that is not done, and sets what Python needs.
EAGLETWIN_BUNDLE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
EAGLETWIN_SITE=${{EAGLETWIN_SITE:-/tmp/eagletwin-gpu}}
if ! cmp -s "$EAGLETWIN_BUNDLE/{SUMS}" "$EAGLETWIN_SITE/{SUMS}"; then  # nothing is there, or half a bundle, or another one
  rm -rf "$EAGLETWIN_SITE/site" "$EAGLETWIN_SITE/eagletwin" "$EAGLETWIN_SITE/weights" "$EAGLETWIN_SITE/{SUMS}"
  mkdir -p "$EAGLETWIN_SITE"
  (cd "$EAGLETWIN_BUNDLE" && sha256sum --quiet --check {SUMS}) || return 1
  for part in $(cut -d " " -f 3 "$EAGLETWIN_BUNDLE/{SUMS}"); do
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' \\
      "$EAGLETWIN_BUNDLE/$part" "$EAGLETWIN_SITE" || return 1
  done
  cp "$EAGLETWIN_BUNDLE/{SUMS}" "$EAGLETWIN_SITE/{SUMS}"
fi
export PYTHONPATH="$EAGLETWIN_SITE/eagletwin/src:$EAGLETWIN_SITE/site"
export EAGLETWIN_WEIGHTS="$EAGLETWIN_SITE/weights"
export EAGLETWIN_CACHE="${{EAGLETWIN_CACHE:-$EAGLETWIN_SITE/cache}}"
python3 - <<'END'
import importlib.util, sys
here = "%d.%d" % sys.version_info[:2]
if here != "{_PYTHON}":
    print("eagletwin: this bundle is for Python {_PYTHON}, and here it is", here, file=sys.stderr)
missing = [name for name in {_IN_THE_IMAGE!r} if importlib.util.find_spec(name) is None]
if missing:
    print("eagletwin: not packed, and missing in this image:", ", ".join(missing), file=sys.stderr)
END
"""


def bundle(folder: Path, checkout: Path, flash_attention: bool = False) -> list[Path]:
    """Write the bundle into `folder`, and return its files. checkout: the root of eagletwin's source tree.

    flash_attention: with the kernels that `--attention fa3` calls
    """
    lock = checkout / "requirements" / "gpu.lock"
    if not lock.is_file():
        raise InputError(f"{lock} is not there", consequence="nothing was packed", remedy="run it in a checkout of eagletwin")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
        site = Path(scratch) / "site"
        for requirement, digests in _requirements(lock).items():
            _unpack(_wheel(requirement, digests), site, flash_attention)
        _pack(folder / SITE, site, "site", lambda path: path.name != _FLASH_KERNELS)
        (folder / FLASH).unlink(missing_ok=True)
        if flash_attention:
            _pack(folder / FLASH, site, "site", lambda path: path.name == _FLASH_KERNELS)
        weights = Path(scratch) / "weights"
        keep(weights)  # another torch would round the random numbers of the recipes otherwise
        _pack(folder / WEIGHTS, weights, "weights")
    _pack(folder / OURS, checkout, "eagletwin", _is_ours(checkout))
    seal(folder)
    return [*_archives(folder), folder / SETUP, folder / SUMS]


def seal(folder: Path) -> None:
    """Write what unpacks the archives of a bundle, and their digests, by which it knows whether it has."""
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in _archives(folder)}
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    (folder / SETUP).write_text(_SETUP_TEXT)


def _archives(folder: Path) -> list[Path]:
    return [path for name in (SITE, OURS, WEIGHTS, FLASH) if (path := folder / name).exists()]


def _requirements(lock: Path) -> dict[str, tuple[str, ...]]:
    """name==version -> sha256 of the files that may serve it."""
    lines = (line.split() for line in lock.read_text(encoding="utf-8").replace("\\\n", "").splitlines())
    return {pin: tuple(word.removeprefix("--hash=sha256:") for word in hashes) for pin, *hashes in lines}


def _wheel(requirement: str, digests: tuple[str, ...]) -> Path:
    """The wheel of name==version for the GPU host, downloaded once. HarnessError where pip has no file of these digests."""
    name, _, version = requirement.partition("==")
    kept = cache_folder("wheels")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    for wheel in kept.glob(pattern):
        if hashlib.sha256(wheel.read_bytes()).hexdigest() in digests:
            return wheel
    with tempfile.TemporaryDirectory(dir=kept) as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(f"{requirement} {' '.join(f'--hash=sha256:{digest}' for digest in digests)}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
        command += ["--require-hashes", "--implementation", "cp", "--dest", scratch, "--requirement", str(wanted)]
        # SGLang's wheels of this age carry a module for one Python, which is left out below
        command += ["--python-version", "3.11" if name == "sglang" else _PYTHON]
        command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
        if subprocess.run(command, check=False).returncode != 0:
            raise HarnessError(
                f"pip cannot download {requirement} for Python {_PYTHON}",
                consequence="the bundle was not packed",
                remedy=f"look at pip's own message, or put the wheel into {kept}",
            )
        [wheel] = Path(scratch).glob(pattern)
        return wheel.replace(kept / wheel.name)


def _unpack(wheel: Path, site: Path, flash_attention: bool) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site, [name for name in archive.namelist() if _is_wanted(name, flash_attention)])


def _is_wanted(name: str, flash_attention: bool = False) -> bool:
    if name.startswith("sglang/"):
        return not name.endswith(".so") and not name.startswith(("sglang/multimodal_gen/", "sglang/test/"))
    if name.startswith("sgl_kernel/") and name.endswith(".so"):
        # the others are of other GPUs, or what other attention backends call
        wanted = ["sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/spatial_ops.abi3.so"]
        return name in wanted + [f"sgl_kernel/{_FLASH_KERNELS}"] * flash_attention
    return not name.startswith("triton_kernels/")


def _is_ours(checkout: Path) -> Callable[[Path], bool]:
    """Whether a file of the checkout is part of it."""
    listed = subprocess.run(
        ["git", "-C", str(checkout), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    ours = {checkout / line for line in listed.stdout.splitlines()}
    return lambda path: path in ours


def _pack(archive: Path, folder: Path, name: str, wanted: Callable[[Path], bool] = lambda _: True) -> None:
    """Pack the wanted files of a folder, by the name it is to have."""
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for path in sorted(folder.rglob("*")):
            if (path.is_file() or path.is_symlink()) and wanted(path):
                tar.add(path, f"{name}/{path.relative_to(folder)}", recursive=False)
