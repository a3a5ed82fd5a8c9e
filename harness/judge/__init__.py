"""The judge: a trace and the reference in, a verdict out. It imports no engine.

judge.py makes the verdict: story.py says what should have been; requests.py, layers.py, trees.py, sampling.py, slots.py and
events.py compare (compare.py, rows.py, bounds.py: how; ranks.py: of several ranks); complete.py asks whether all of it was
recorded, features.py what the case reached. distances.py measures two traces as the judge measures one.
"""
