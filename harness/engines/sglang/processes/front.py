"""The process that imports SGLang with its HTTP front end once, and forks servers: zygote.py, with more to import.

    caller ── socket ── front              imports SGLang and its front end; no server
                          └─ supervisor    one server: ends it when the caller hangs up, and says how it ended (server.py)
                               └─ SGLang's launch_server: HTTP, tokenizer manager
                                    ├─ scheduler
                                    └─ detokenizer

Started by engines/start.py as `python -m eagletwin.harness.engines.sglang.processes.front FD [VERSION ROOT [CHANGES]]`.
"""

from .zygote import main

if __name__ == "__main__":
    main(front=True)
