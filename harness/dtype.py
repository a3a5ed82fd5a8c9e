"""The types that an engine may compute in. Imports nothing slow: modes, traces and bounds are named by them."""

from typing import Literal

# float32 is the mode in which every choice can be told; bfloat16 is what users run, and a part of the choices are ties
Dtype = Literal["float32", "bfloat16"]
