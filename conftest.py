"""Test-wide settings: one thread per process (xdist already uses every core), and no leftovers in the user's cache or tree."""

import os

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"
