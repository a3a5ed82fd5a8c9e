"""Which parts of a worker hold the number of draft steps, and the number of nodes, of a round whose steps are adaptive.

In the order of the two tensors of a trace's record `steps`; a part that a round has not says -1.
"""

STEPS_OF = (
    "the worker",
    "the draft worker",
    "the running configuration",
    "verify's input",
    "the draft's attention backend",
    "the target's attention backend",
    "draft extend's attention backend",
)
NODES_OF = (
    "the worker",
    "the draft worker",
    "the running configuration",
    "verify's input",
    "the target's attention backend",
    "draft extend's attention backend",
)
