"""The types that an engine may compute in. Imports nothing slow: modes, traces and bounds are named by them."""

from typing import Literal

# float32 is the mode in which every choice can be told; bfloat16 is what users run, and a part of the choices are ties
Dtype = Literal["float32", "bfloat16"]

# Branches of the widest trees that are worth generating: of 16, and with EAGLE-3 of 8, more than three quarters of the choices
# cannot be told in bfloat16 (docs/bfloat16.md), and a case is unknown.
WIDEST: dict[Dtype, int] = {"float32": 16, "bfloat16": 4}
