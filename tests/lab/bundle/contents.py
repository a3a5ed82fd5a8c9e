"""What the bundle of each release holds: its packages, what is left out of them, and what the host's image brings.

A new release is a new entry of `CONTENTS` and a list of pins in requirements/. What no case calls is left out; what 0.5.23
needs and why is in docs/guide/gpu.md.
"""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from eagletwin.harness.core.errors import InputError

PYTHON = "3.12"
ARCH = 90  # Hopper: H100, H200

# FlashAttention 3 holds a kernel for each type, size of head and kind of cache. Cases have bfloat16 and heads of up to 64, with
# values of that size or of 512 (latent attention), and no soft cap.
_FLASH_KERNELS = r"flash_fwd_hdim(64|64_512|192_128)_bf16_(?!.*softcap)(\w+_)?sm90|flash_prepare\w*|flash_fwd_combine\w*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """One release's bundle. Patterns are those of fnmatch, over a file's path in site-packages; `*` matches `/` too.

    without: packages, and what is left out of them. despite: what of that travels all the same.
    sources: of libraries, the .cu files whose kernels stay.
    """

    release: str
    lock: str
    without: tuple[str, ...]
    despite: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=lambda: {"sgl_kernel/flash_ops.*.so": _FLASH_KERNELS})
    stays: tuple[str, ...] = ()  # packages of the lock that are used where the bundle is packed, and do not travel
    pythons: dict[str, str] = field(default_factory=dict)  # of packages that have no wheel for PYTHON: whose is taken
    image: tuple[str, ...]  # modules that the host's own Python must have
    libraries: tuple[str, ...] = ()  # folders of `nvidia` in the image that the packed torch finds beside itself
    paths: tuple[str, ...] = ()  # folders of site-packages that a .pth file would add to the path
    compiles: bool = False  # its kernels are compiled by nvcc when they are first used

    def holds(self, name: str) -> bool:
        """Whether a file of a wheel travels."""
        left_out = any(fnmatchcase(name, pattern) for pattern in self.without)
        return not left_out or any(fnmatchcase(name, pattern) for pattern in self.despite)

    def sources_of(self, name: str) -> str:
        """The pattern of the .cu files whose kernels stay in this library; empty: all."""
        return next((sources for pattern, sources in self.sources.items() if fnmatchcase(name, pattern)), "")


_OF_ALL = ("numpy", "safetensors", "packaging", "typing_extensions", "rich", "shellingham", "annotated_doc", "hypothesis")

# Of the package sglang, what a release's folder lacks as well (provision.py): else the host's would differ from the release.
_SGLANG = (
    "sglang/multimodal_gen/*",
    *(f"sglang/srt/{name}/*.so" for name in ("grpc", "server", "multimodal", "rust_extensions")),
)
# infllm_ops and flashmla_ops are of attention backends that no case has; sm100 is of another GPU
_KERNELS = ("sgl_kernel/infllm_ops*.so", "sgl_kernel/flashmla_ops*.so", "sgl_kernel/sm100/*")

_TORCH = ("torch/include/*", "torch/bin/protoc*", "torch/share/*")  # torch imports torchgen, functorch and torch.testing
_TRITON = (
    *("triton/backends/nvidia/lib/cupti*", "triton/_C/libproton.so", "triton/instrumentation/*", "triton/plugins/*"),
    *("*/ptxas-blackwell", "*/cuobjdump", "*/nvdisasm", "*/FileCheck", "triton/backends/amd/lib/*"),
)
# FlashInfer travels for its headers, which SGLang compiles against, and for its Python
_FLASHINFER = (
    *("flashinfer/data/csrc/cake*", "flashinfer/data/csrc/kda/*", "flashinfer/data/csrc/fused_moe/*"),
    *("flashinfer/data/csrc/gdn/*", "flashinfer/data/csrc/experimental/*", "flashinfer/data/csrc/blackwell_*"),
    *("flashinfer/data/csrc/alphamoe*", "flashinfer/experimental/*/csrc/*"),
    *("flashinfer/fused_moe/backends/cudnn_frost/artifacts/*",),
    *(f"flashinfer/data/cutlass/{folder}/*" for folder in ("python", "test", "examples")),
)
# with which it chooses experts
_ROUTING = (
    *(f"flashinfer/data/csrc/fused_moe/{name}" for name in ("noAuxTcKernels.cu", "moeTopKFuncs.cuh")),
    "flashinfer/data/csrc/cake_deepseek*",
)
_OTHERS = (
    *("nvidia/nccl/*.bc", "nvidia_cutlass_dsl/*/stubs/*", "nvidia_cutlass_dsl/*.a", "torch_memory_saver*cu12*"),
    *("include/*",),  # nvidia-cudnn-frontend's, beside all packages
)

CONTENTS = {
    "0.5.17": Contents(
        release="0.5.17",
        lock="gpu.lock",
        without=(*_SGLANG, *_KERNELS, "triton_kernels/*"),
        pythons={"sglang": "3.11"},  # of Python's version is only a library that is left out
        image=(*_OF_ALL, "torch", "triton"),
    ),
    "0.5.23": Contents(
        release="0.5.23",
        lock="gpu23.lock",
        # the Rust radix tree stays: it is the release's default
        without=(*_SGLANG, *_KERNELS, *_TORCH, *_TRITON, *_FLASHINFER, *_OTHERS),
        despite=_ROUTING,
        stays=("nvidia-curand",),
        image=(*_OF_ALL, "aiohttp", "huggingface_hub", "einops", "ninja", "nvidia"),
        libraries=("cu13", "cudnn", "cusparselt", "nvshmem"),
        paths=("nvidia_cutlass_dsl/dsl_packages",),
        compiles=True,
    ),
}


def contents_of(release: str) -> Contents:
    """The bundle's contents for a release. Raises InputError for one that has none."""
    if release not in CONTENTS:
        raise InputError(
            f"no bundle is described for SGLang {release!r}",
            consequence="nothing was packed",
            remedy=f"ask for {' or '.join(CONTENTS)}; CONTENTS in tests/lab/bundle/contents.py has them",
        )
    return CONTENTS[release]
