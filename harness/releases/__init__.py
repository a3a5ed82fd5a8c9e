"""What holds on each published release of SGLang, measured on its wheel: the ledger, and greedy output.

hosts.py starts one release after another; measure.py asks it; store.py keeps the answers, a file a release, so that one can be
asked again and nothing is asked twice; report/releases.py makes docs/releases.md of them.
"""
