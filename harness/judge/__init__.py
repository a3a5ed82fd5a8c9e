"""The judge: a trace and the reference in, a verdict out. It imports no engine.

judge.py makes the verdict: replay.py says what should have been, and each record goes to the rules of its stage, in rules/
(compare.py, bounds.py: how they compare; ranks.py: of several ranks); completeness.py asks whether all of it was
recorded, features.py what the case reached. distances.py measures two traces as the judge measures one.
"""
