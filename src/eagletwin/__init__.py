"""eagletwin: a slow, obvious reference of the EAGLE draft chain beside SGLang's real workers.

The three folders beside this file are links to the ones at the top of the checkout (docs/explanation/decisions/0001).
"""

__version__ = "0.1.0"
