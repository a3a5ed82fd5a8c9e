"""A trained pair: a byte-level Llama, and three drafts of it, made in minutes from text that comes with Python.

settings.py says how large it is and how long it is trained, text.py what it reads. target.py trains the target, heads.py and
distil.py train drafts on it, measure.py asks how many of their tokens it accepts, and pair.py does all of this and writes the
checkpoints. cached.py keeps a pair, so that it is made once.
"""
