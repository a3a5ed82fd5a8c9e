"""Test-wide settings, before anything is imported: one thread per process (xdist already uses every core), and Triton's
kernels interpreted, which Triton decides once and for all when it is imported (TRITON_INTERPRET=0 for tests/gpu).
torch.compile compiles nothing: it would take seconds, where SGLang is imported (tests/kernels).
Bytecode is kept, which container images tell Python not to: each process would compile torch and the tests anew (20 s)."""

import os
import sys

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
