"""The types that an engine may compute in. Imports nothing slow: modes, traces and bounds are named by them."""

from typing import Literal

# float32 is the mode in which the judge can decide every choice; bfloat16 is what users run, and makes part of the choices ties
Dtype = Literal["float32", "bfloat16"]

# Branches of the widest trees that are worth generating: of 16, and with EAGLE-3 of 8, more than three quarters of the choices
# are ties in bfloat16 (docs/explanation/bfloat16.md), and the verdict is unknown.
WIDEST: dict[Dtype, int] = {"float32": 16, "bfloat16": 4}
