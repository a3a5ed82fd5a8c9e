"""`eagletwin gpu bundle`: pack a release of SGLang, and what it needs of one GPU architecture, for a host without network.

`contents.py` says what a release's bundle holds, `wheels.py` downloads it, `slim.py` empties what other GPUs need, `kernels.py`
compiles ahead, `archives.py` compresses, `pack.py` does all of it in order and cuts the result into parts. `unpack.py` travels
with them: it is what the host runs.
"""
