"""The acceptance that a pair of checkpoints deserves, and what an engine gives it (docs/guide/acceptance.md).

checkpoint.py reads folders, draft.py makes heads of the reference from them, target.py runs transformers' model; follow.py says
of each position of a text which drafts are accepted there, rounds.py how many rounds that makes, statistics.py what share.
"""
