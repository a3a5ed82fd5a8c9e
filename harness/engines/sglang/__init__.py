"""SGLang's own scheduler and EAGLE worker, in-process, stepped and recorded. The only folder that knows SGLang.

zygote.py is the process that imports it; boot.py builds the scheduler of a configuration; drive.py steps it through a case;
taps.py records what the worker does; pools.py reads and poisons KV pools; patches.py undoes fixes in memory.
"""
