"""What is packed for a GPU host, what of it is emptied, and how it arrives there: in parts, checked, and unpacked once."""

import os
import re
import struct
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eagletwin.harness.core.errors import HarnessError, InputError
from eagletwin.harness.engines.provision import LEFT_OUT

from .bundle import archives, unpack
from .bundle import pack as packing
from .bundle.archives import Kept, _runs_on, is_library, requirements, slim
from .bundle.contents import ARCH, CONTENTS, Contents, contents_of
from .bundle.pack import Archive, needs, seal, unzip

ROOT = Path(__file__).parents[2]

# Stands for the wheel of zstd, which a bundle brings along: gzip by zstd's names, and no package that a test would need.
ZSTD = """
import gzip
class _Names:
    def __getattr__(self, name): return name
CompressionParameter = DecompressionParameter = _Names()
class ZstdFile(gzip.GzipFile):
    def __init__(self, file, mode="r", *, options):
        opened = file if hasattr(file, "read") else open(file, mode + "b")
        super().__init__(filename="", fileobj=opened, mode=mode + "b", mtime=0)
        self.myfileobj = opened
"""


@pytest.mark.parametrize("release", CONTENTS)
def test_a_bundle_leaves_out_what_no_case_calls(release: str) -> None:
    contents = contents_of(release)
    wanted = (
        *("sglang/srt/server_args.py", "sgl_kernel/infllm_v2/__init__.py", "msgspec/a.so"),
        *("sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/flash_ops.abi3.so"),
    )
    unwanted = (
        *("sglang/srt/rust_extensions/_server.cpython-312-x86_64-linux-gnu.so",),
        *("sglang/multimodal_gen/a.py", "sgl_kernel/sm100/common_ops.abi3.so", "sgl_kernel/flashmla_ops.abi3.so"),
    )
    assert all(map(contents.holds, wanted))
    assert not any(map(contents.holds, unwanted))
    with pytest.raises(InputError, match=r"ask for 0.5.17 or 0.5.23"):
        contents_of("0.5.18")


@pytest.mark.parametrize("release", CONTENTS)
@pytest.mark.parametrize(
    "name", ["multimodal_gen/a.py", "test/a.py", "srt/mem_cache/rust_tree_core/a.so", "srt/grpc/a.so", "a.py"]
)
def test_the_host_has_of_a_release_what_its_folder_has(release: str, name: str) -> None:
    """Else every verdict there would be of a tree that differs from the release."""
    assert contents_of(release).holds(f"sglang/{name}") == (not LEFT_OUT.match(f"sglang/{name}"))


@pytest.mark.parametrize("release", CONTENTS)
def test_of_flash_attention_the_kernels_stay_that_cases_call(release: str) -> None:
    pattern = contents_of(release).sources_of("sgl_kernel/flash_ops.abi3.so")
    stay = ("flash_fwd_hdim64_bf16_sm90", "flash_fwd_hdim64_bf16_paged_split_sm90", "flash_fwd_hdim64_512_bf16_paged_sm90")
    go = ("flash_fwd_hdim64_bf16_paged_softcap_sm90", "flash_fwd_hdim64_bf16_paged_sm80", "flash_fwd_hdim128_bf16_sm90", "")
    assert all(re.fullmatch(pattern, name) for name in (*stay, "flash_prepare_scheduler", "flash_fwd_combine"))
    assert not any(re.fullmatch(pattern, name) for name in go)
    assert not contents_of(release).sources_of("torch/lib/libtorch_cuda.so")


@pytest.mark.parametrize("contents", CONTENTS.values(), ids=list(CONTENTS))
def test_every_package_of_a_bundle_is_pinned(contents: Contents) -> None:
    pins = requirements(ROOT / "requirements" / contents.lock)
    names = [pin.partition("==")[0] for pin in pins]
    assert f"sglang=={contents.release}" in pins
    assert {"backports-zstd", *contents.stays, *contents.pythons} <= set(names)
    assert all(pin.count("==") == 1 and digests for pin, digests in pins.items())


def test_a_wheel_of_the_cache_is_taken_for_the_pythons_that_it_runs_on() -> None:
    runs = {name: [python for python in ("3.11", "3.12") if _runs_on(Path(f"a-1-{name}-linux.whl"), python)] for name in (
        *("py3-none", "py37-none", "cp312-cp312", "cp311-cp311", "cp310-abi3", "cp312-abi3", "py2.py3-none"),
    )}  # fmt: skip
    both = ["3.11", "3.12"]
    assert runs.pop("cp312-cp312") == runs.pop("cp312-abi3") == ["3.12"]
    assert runs.pop("cp311-cp311") == ["3.11"]
    assert all(found == both for found in runs.values())


def entry(kind: int, arch: int, code: bytes) -> bytes:
    return struct.pack("<HHIQIIHHI", kind, 1, 64, len(code), 0, 0, 0, 0, arch).ljust(64, b"\1") + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(sections: dict[str, tuple[int, int, bytes]]) -> bytes:
    """An ELF file of these sections: kind, flags, content."""
    names, body, table = b"\0", b"\x7fELF\x02\x01".ljust(64, b"\0"), [bytes(64)]
    for name, (kind, flags, content) in {**sections, ".shstrtab": (3, 0, b"")}.items():
        at, names = len(names), names + name.encode() + b"\0"
        content = names if name == ".shstrtab" else content
        table.append(struct.pack("<IIQQQQIIQQ", at, kind, flags, 0, len(body), len(content), 0, 0, 8, 0))
        body += content
    head = bytearray(body)
    struct.pack_into("<Q", head, 0x28, len(body))
    struct.pack_into("<HHH", head, 0x3A, 64, len(table), len(table) - 1)
    return bytes(head) + b"".join(table)


CUBIN, PTX = 2, 1
FAT = container(entry(CUBIN, 80, b"a80." * 4), entry(CUBIN, 90, b"a90." * 4)) + bytes(8)
FAT += container(entry(PTX, 90, b"p90." * 4), entry(PTX, 120, b"p120" * 4))


def test_a_library_keeps_its_offsets_and_the_code_of_one_gpu_alone(tmp_path: Path) -> None:
    file = tmp_path / "liba.so.2"
    sections = {
        ".text": (1, 6, b"text" * 4),
        ".nv_fatbin": (1, 2, FAT),
        "__nv_relfatbin": (1, 2, container(entry(CUBIN, 90, b"rel." * 4))),
        ".debug_info": (1, 0, b"debug..." * 2),
        ".symtab": (2, 0, b"symbols." * 2),
        ".strtab": (3, 0, b"strings." * 2),
        ".dynstr": (3, 2, b"loaded.." * 2),
    }
    whole = library(sections)
    file.write_bytes(whole)
    assert is_library(file)
    assert slim(file, Kept(arch=90)) == (32, 16 + 16 + 16 + 16 + 16 + 16)
    slimmed = file.read_bytes()
    expected = whole
    for gone in (b"a80." * 4, b"p120" * 4, b"rel." * 4, b"debug..." * 2, b"symbols." * 2, b"strings." * 2):
        expected = expected.replace(gone, bytes(len(gone)))
    assert slimmed == expected
    assert slim(file, Kept(arch=90))[0] == 32  # again: what is empty is read as before


def test_of_kernels_that_name_their_source_those_of_others_go(tmp_path: Path) -> None:
    codes = [b"_INTERNAL_0123abcd_7_one_cu_", b"_INTERNAL_0123abcd_7_two_cu_", b"\x28\xb5\x2f\xfd compressed....."]
    file = tmp_path / "a.so"
    file.write_bytes(library({".nv_fatbin": (1, 2, container(*(entry(CUBIN, 90, code) for code in codes)))}))
    slim(file, Kept(arch=90, sources="one|three"))
    assert [code in file.read_bytes() for code in codes] == [True, False, False]


@pytest.mark.parametrize(
    "broken", [b"garbage." * 4, container(entry(CUBIN, 90, b"code" * 4))[:-8], container(b"\2\0\1\0" + bytes(60))]
)
def test_a_library_of_another_format_is_an_error(tmp_path: Path, broken: bytes) -> None:
    file = tmp_path / "a.so"
    file.write_bytes(library({".nv_fatbin": (1, 2, broken)}))
    with pytest.raises(HarnessError, match=r"a.so is not a library with CUDA code as this eagletwin knows it"):
        slim(file, Kept(arch=90))


def test_a_wheel_is_unpacked_slim_and_programs_can_be_run(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for name, mode in (("triton/bin/ptxas", 0o755), ("triton/bin/nvdisasm", 0o755), ("sglang/multimodal_gen/a.py", 0o644)):
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            wheel.writestr(member, "text")
        wheel.writestr("a/a.so", library({".symtab": (2, 0, b"symbols.")}))
        wheel.writestr("sglang/a.so", library({".symtab": (2, 0, b"symbols.")}))
        wheel.writestr("a/b.so", "GROUP ( a.so )")  # a script for the linker
    unzip(tmp_path / "a.whl", tmp_path / "site", contents_of("0.5.23"))
    found = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert found == {"triton/bin/ptxas", "a/a.so", "sglang/a.so", "a/b.so"}
    assert os.access(tmp_path / "site" / "triton" / "bin" / "ptxas", os.X_OK)
    assert b"symbols." not in (tmp_path / "site" / "a" / "a.so").read_bytes()
    assert b"symbols." in (tmp_path / "site" / "sglang" / "a.so").read_bytes()  # the release is known by its content


@pytest.fixture
def zstd() -> Any:
    module = ModuleType("zstd")
    exec(ZSTD, module.__dict__)
    return module


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    file = tmp_path / "backports_zstd-1-cp312-cp312-linux.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("backports/zstd/__init__.py", ZSTD)
    return file


class Bundle:
    """A bundle of small files, in parts of 100 bytes."""

    def __init__(self, folder: Path, zstd: Any, decoder: Path) -> None:
        self.folder, self.packed, self.site = folder, folder / "packed", folder / "site"
        self._zstd, self._decoder = zstd, decoder

    def pack(self, text: str) -> list[str]:
        """Pack it and return its parts."""
        self.packed.mkdir(exist_ok=True)
        listed = []
        for name in ("site", "eagletwin", "weights"):
            file = self.folder / f"{name}.txt"
            file.write_text(f"{name} {text}")
            file.chmod(0o755)
            listed.append(Archive(name, self.folder / f"{name}.tar"))
            archives.pack(self._zstd, listed[-1].file, [("a/b.txt", file)])
        about = {"release": "0.5.17", **needs(contents_of("0.5.17"))}
        return [file.name for file in seal(self.packed, about, listed, self._decoder, part=100) if "part-" in file.name]


@pytest.fixture
def bundle(tmp_path: Path, zstd: Any, decoder: Path) -> Bundle:
    return Bundle(tmp_path, zstd, decoder)


def test_the_same_files_make_the_same_archive_whenever_they_were_written(tmp_path: Path, zstd: Any) -> None:
    file = tmp_path / "a.txt"
    for name, when in (("one", 1_000_000), ("two", 2_000_000)):
        file.write_text("text")
        os.utime(file, (when, when))
        archives.pack(zstd, tmp_path / name, [("b", file), ("a", file)])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert not list(tmp_path.glob("*.unfinished"))


def test_parts_arrive_one_by_one_and_what_lacks_or_is_damaged_is_named(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = bundle.pack("first")
    assert len(parts) > 3
    there = tmp_path / "there"
    for number, part in enumerate(parts):
        arriving = tmp_path / f"arriving-{number}"
        arriving.mkdir()
        for name in (unpack.MANIFEST, part):
            (arriving / name).write_bytes((bundle.packed / name).read_bytes())
        lacking = unpack.take(arriving, there)
        assert [line for line in lacking if "part-" in line] == [f"{name} is missing" for name in parts[number + 1 :]]
    assert unpack.main(["take", str(bundle.packed), str(there)]) == 0
    whole = (there / parts[1]).read_bytes()
    (there / parts[1]).write_bytes(whole[:-1])
    (there / parts[2]).write_bytes(bytes(len(whole)))
    assert unpack.main(["check", str(there)]) == 1
    said = capsys.readouterr().err
    assert f"{parts[1]} is damaged: it has 99 bytes, and should have 100" in said
    assert f"{parts[2]} is damaged: its sha256 is not the manifest's" in said
    assert unpack.main(["unpack", str(there), str(tmp_path / "site")]) == 1
    assert not (tmp_path / "site").exists()
    assert unpack.take(bundle.packed, there) == []
    bundle.pack("second")  # parts of an older bundle make way, and the others stay
    (bundle.packed / parts[0]).unlink()
    assert f"{parts[0]} is missing" in unpack.take(bundle.packed, there)


@pytest.mark.slow
def test_a_bundle_is_unpacked_once_in_full_and_again_when_it_is_another(bundle: Bundle) -> None:
    site = bundle.site
    command = f". {bundle.packed}/setup.sh >&2 && cat {site}/weights/a/b.txt && echo :$PYTHONPATH:$EAGLETWIN_WEIGHTS"

    def source() -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "EAGLETWIN_SITE": str(site)}
        return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)

    bundle.pack("first")
    assert source().stdout == f"weights first:{site}/eagletwin/src:{site}/site:{site}/weights\n"
    assert (site / "site" / "a" / "b.txt").read_text() == "site first"
    assert os.access(site / "site" / "a" / "b.txt", os.X_OK)
    assert (site / "site" / "a" / "b.txt").stat().st_mtime > 0
    (site / "weights" / "a" / "b.txt").write_text("kept")
    assert source().stdout.startswith("kept")  # what is unpacked is not unpacked again
    (site / "site" / "stray.txt").write_text("of the one before")
    parts = bundle.pack("second")
    assert source().stdout.startswith("weights second")
    assert not (site / "site" / "stray.txt").exists()
    (bundle.packed / parts[0]).write_bytes(b"cut off")
    broken = source()
    assert broken.returncode == 1
    assert f"{parts[0]} is damaged" in broken.stderr


def test_the_host_says_what_the_image_lacks_and_links_what_it_has(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle.pack("first")
    unpack.unpack(bundle.packed, bundle.site)
    manifest = (bundle.site / unpack.MANIFEST).read_text()
    (bundle.site / unpack.MANIFEST).write_text(
        manifest.replace('"libraries": []', '"libraries": ["cu13", "cudnn"]')
        .replace('"compiles": false', '"compiles": true')
        .replace('"safetensors"', '"no_such_package"')
    )
    image, home = tmp_path / "image", tmp_path / "toolkit"
    (image / "nvidia" / "cu13" / "include").mkdir(parents=True)
    (home / "include").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(bundle.site / "site"), str(image)])
    monkeypatch.setenv("CUDA_HOME", str(home))
    text = unpack.environment(bundle.site)
    assert (bundle.site / "site" / "nvidia" / "cu13").resolve() == image / "nvidia" / "cu13"
    assert f"export CUDA_HOME={home}\nexport CPATH={image}/nvidia/cu13/include\n" in text
    (home / "include" / "curand.h").touch()
    assert "CPATH" not in unpack.environment(bundle.site)
    monkeypatch.setattr("sys.path", [str(image)])
    monkeypatch.setenv("PATH", str(tmp_path))
    lacking = unpack.lacks(bundle.site)
    assert {"no_such_package", "nvidia/cudnn", f"{home}/lib64/libcudart.so", "g++", "ninja"} <= set(lacking)
    assert "nvidia/cu13" not in lacking


def program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


# A compiler that writes all that it was asked into the file that it was to write.
WRITES = 'all="$*"; while [ "$1" != -o ] && [ $# -gt 0 ]; do shift; done; [ -n "$2" ] && echo "$all" > "$2"; true'


def test_what_requests_that_sample_need_is_compiled_ahead_once_where_there_is_an_nvcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "flashinfer.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("flashinfer/data/csrc/sampling.cu", "")
    home = tmp_path / "toolkit"
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    program(home / "bin" / "nvcc", WRITES)
    program(tmp_path / "bin" / "g++", WRITES)
    library = packing.compiled_ahead({"flashinfer-python": wheel}, tmp_path)
    assert library is not None
    assert all(f"{name}.o" in library.read_text() for name in ("sampling", "renorm", "flashinfer_sampling_binding"))
    program(home / "bin" / "nvcc", 'case "$*" in *--version*) ;; *) echo "error: of the compiler" >&2; exit 1 ;; esac')
    assert packing.compiled_ahead({"flashinfer-python": wheel}, tmp_path) == library  # it is kept
    library.unlink()
    with pytest.raises(HarnessError, match="nvcc cannot compile FlashInfer's sampling"):
        packing.compiled_ahead({"flashinfer-python": wheel}, tmp_path)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(packing, "cuda_home", lambda: None)
    assert packing.compiled_ahead({"flashinfer-python": wheel}, tmp_path) is None


def test_the_kernels_are_those_of_the_gpu_that_is_packed_for() -> None:
    assert f"-gencode=arch=compute_{ARCH}a,code=sm_{ARCH}a" in packing._FLAGS
