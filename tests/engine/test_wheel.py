"""The wheel, installed in a clean environment next to SGLang, works and leaves nothing generic in anyone's site-packages."""

import os
import site
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def variables() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


@pytest.fixture
def clean(tmp_path: Path, variables: dict[str, str]) -> Path:
    """The programs of an environment in which the wheel, as it is built, is the only eagletwin."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", tmp_path, _copy(tmp_path / "source")], check=True)
    [wheel] = tmp_path.glob("eagletwin-*.whl")
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"eagletwin", f"{wheel.name.split('-py3')[0]}.dist-info"}
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("eagletwin/")}
    package = ROOT / "src" / "eagletwin"
    sources = {
        (Path("eagletwin") / file.relative_to(package)).as_posix()
        for folder in (package, *(one for one in package.iterdir() if one.is_dir()))
        for file in (folder.glob("*.py") if folder == package else folder.rglob("*.py"))
    }
    assert sources <= shipped

    environment = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel], check=True)
    # SGLang and the rest come from this environment; the editable eagletwin of the checkout must not: its .pth is not read
    packages = Path(
        subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True).strip()
    )
    here = list(dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]))
    (packages / "beside.pth").write_text("\n".join(here) + "\n")

    where = "import eagletwin.harness, sys; print(eagletwin.harness.__file__); print('harness' in sys.modules)"
    shown = subprocess.check_output([python, "-P", "-c", where], text=True, cwd=tmp_path, env=variables).split()
    assert shown == [str(packages / "eagletwin" / "harness" / "__init__.py"), "False"]
    return environment / "bin"


def test_the_built_wheel_holds_each_module_and_the_data_that_a_command_reads(clean: Path, variables: dict[str, str]) -> None:
    known = subprocess.check_output([clean / "eagletwin", "info", "releases", "list"], env=variables, text=True)
    assert len(known.splitlines()) == 19


@pytest.mark.long
def test_the_built_wheel_checks_a_case_in_a_clean_environment(clean: Path, variables: dict[str, str], tmp_path: Path) -> None:
    command = [clean / "eagletwin", "check", "26329", "--revert", "26329"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert "draft.input_ids" in done.stdout


def _copy(folder: Path) -> Path:
    """The files that git would hand out, so that a build leaves nothing in the checkout."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).exists():
            source, target = ROOT / name, folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                target.symlink_to(os.readlink(source))
            else:
                target.write_bytes(source.read_bytes())
    return folder
