"""Engines: run a case on a real worker and return a trace. They judge nothing.

start.py starts the process that imports SGLang; host.py is the caller's side (processes, time limits, verdict-free
outcomes); sglang/ is the only folder that knows SGLang.
"""
