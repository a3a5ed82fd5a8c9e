"""Test-wide settings, before anything is imported: one thread per process (xdist already uses every core), and Triton's
kernels interpreted, which Triton decides once and for all when it is imported (TRITON_INTERPRET=0 for tests/gpu).
torch.compile compiles nothing: it would take seconds, where SGLang is imported (tests/kernels)."""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
os.environ.setdefault("TRITON_INTERPRET", "1")
