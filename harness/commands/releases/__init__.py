"""What holds on each published release of SGLang, measured on its wheel: the ledger, and greedy output.

engines/release_hosts.py starts one release after another; survey.py asks it; results.py keeps the answers, so that
one can be asked again and nothing is asked twice; report.py makes the page of them.
"""
