"""What a worker runs on, and how it is driven. Imports nothing slow: start.py reads it before torch is there."""

from typing import Literal

from msgspec import Struct

# The types that an engine may compute in. Imports nothing slow: modes, traces and bounds are named by them.

# float32 is the mode in which the judge can decide every choice; bfloat16 is what users run, and makes part of the choices ties
Dtype = Literal["float32", "bfloat16"]

# Branches of the widest trees that are worth generating: of 16, and with EAGLE-3 of 8, more than three quarters of the choices
# are ties in bfloat16 (docs/explanation/bfloat16.md), and the verdict is unknown.
WIDEST: dict[Dtype, int] = {"float32": 16, "bfloat16": 4}


Device = Literal["cpu", "cuda"]
Attention = Literal["triton", "fa3", "flashinfer", "flashmla"]
FLASHINFER_HEAD = 64  # the narrowest head for which FlashInfer has kernels
FLASHMLA_PAGE = 64  # the page size of FlashMLA's kernels


class Mode(Struct, frozen=True):
    """What the worker runs on, and how it is driven; what a case asks for does not depend on it.

    graphs   batch sizes for which its CUDA graphs are captured: a smaller batch is padded to the next one, a larger one runs
             without a graph. Empty: no graphs.
    prefill_graphs  token counts for which graphs of prefill are captured; empty: none
    dtype    what the worker computes in, and keeps its KV rows in
    overlap  the release's overlap scheduler: a batch is launched before the results of the one before are looked at
    attention  SGLang's attention backend, of target and draft. fa3, FlashAttention 3, flashinfer and flashmla are a GPU's, and
             know no float32; flashmla is for latent attention alone, chains, and pages of 64
    gpu      number of the GPU, of those that this process may see; -1: as the process sees them
    tp       tensor parallelism: ranks that share the work, a process each, on a GPU a GPU each
    pp       pipeline parallelism: stages, a process each, that have some of the target's layers each; the last one drafts
    """

    device: Device = "cpu"
    graphs: tuple[int, ...] = ()
    prefill_graphs: tuple[int, ...] = ()
    overlap: bool = False
    dtype: Dtype = "float32"
    gpu: int = -1
    tp: int = 1
    attention: Attention = "triton"
    pp: int = 1

    @property
    def processes(self) -> int:
        """Processes that run a case together."""
        return self.tp * self.pp

    @property
    def options(self) -> list[str]:
        """How it is typed on the command line; empty for the CPU engine as it always is."""
        more = ["--tp", str(self.tp)] if self.tp > 1 else []
        more += ["--pp", str(self.pp)] if self.pp > 1 else []
        more += ["--dtype", self.dtype] if self.dtype != "float32" else []
        more += ["--attention", self.attention] if self.attention != "triton" else []
        if self.device == "cpu":
            return (["--overlap"] if self.overlap else []) + more
        graphs = ["--graphs", ",".join(map(str, self.graphs)) or "none"]
        graphs += ["--prefill-graphs", ",".join(map(str, self.prefill_graphs))] if self.prefill_graphs else []
        return ["--device", "cuda", *graphs, "--overlap" if self.overlap else "--no-overlap", *more]

    @property
    def words(self) -> str:
        """For a trace's header; empty for the CPU engine as it always is."""
        if self.device == "cpu":
            return "" if self.dtype == "float32" else self.dtype
        graphs = f"graphs {' '.join(map(str, self.graphs))}" if self.graphs else "no graphs"
        if self.prefill_graphs:
            graphs += f" (prefill {' '.join(map(str, self.prefill_graphs))})"
        attention = "" if self.attention == "triton" else f", {self.attention}"
        return f"{graphs}, {'with' if self.overlap else 'no'} overlap, {self.dtype}{attention}"


CPU = Mode()
