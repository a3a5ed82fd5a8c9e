"""The judge: a trace and the reference in, a verdict out. It imports no engine.

judge.py makes the verdict: replay.py says what should have been; requests.py, multi_layer_draft.py, trees.py, sampling.py,
slots.py and events.py compare (compare.py, bounds.py, bounds.py: how; ranks.py: of several ranks); completeness.py asks whether
all of it was recorded, features.py what the case reached. distances.py measures two traces as the judge measures one.
"""
