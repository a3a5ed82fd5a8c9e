"""Tiny wheels for tests of what is fetched: real in form, so that pip and RECORD see nothing odd in them."""

import base64
import hashlib
import zipfile
from pathlib import Path

from eagletwin.harness.engines.provision import Section


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str], *, lie: bool = False) -> str:
    """Write a wheel with these files; return its sha256. lie: its RECORD names another digest than one file has."""
    info = f"{name}-{version}.dist-info"
    everything = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in everything.items()]
    if lie:
        rows[0] = rows[0].replace(_digest(next(iter(files.values()))), _digest("something else"))
    everything[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for path, text in everything.items():
            packed.writestr(path, text)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def make_release(folder: Path, version: str = "0.0.1", *, lie: bool = False) -> Section:
    """A release of sglang in four files, one of which is not needed here; and how a lock file pins it."""
    files = {
        "sglang/__init__.py": "one = 1\n",
        "sglang/srt/__init__.py": "",
        "sglang/srt/engine.py": "two = 2\n",
        "sglang/multimodal_gen/pictures.py": "many = 10**6\n",
    }
    digest = make_wheel(folder, "sglang", version, files, lie=lie)
    return Section("releases", version, {f"sglang=={version}": (digest,)})


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
