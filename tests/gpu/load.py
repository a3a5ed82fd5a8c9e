"""Load on a running server, and its throughput: so many clients, each with one request after the other, for so many seconds.

`python tests/gpu/load.py URL PROMPTS [--clients 16] [--seconds 60] [--new-tokens 128]`; a line of PROMPTS holds `input_ids`.
Prints one JSON object. The first fifth of the time is not counted: a server warms up.
"""

import argparse
import json
import threading
import time
import urllib.request
from itertools import count
from pathlib import Path


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--new-tokens", type=int, default=128)
    asked = parser.parse_args()
    prompts = [json.loads(line)["input_ids"] for line in asked.prompts.read_text(encoding="utf-8").splitlines()]
    numbers, done = count(), list[tuple[float, int, int]]()  # when an answer ended, its tokens, its rounds
    begin = time.monotonic()

    def client() -> None:
        while time.monotonic() < begin + asked.seconds:
            body = {
                "input_ids": prompts[next(numbers) % len(prompts)],
                "sampling_params": {"max_new_tokens": asked.new_tokens, "temperature": 0, "ignore_eos": True},
            }
            request = urllib.request.Request(
                f"{asked.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as reply:
                meta = json.load(reply)["meta_info"]
            done.append((time.monotonic() - begin, meta["completion_tokens"], meta.get("spec_verify_ct", 0)))

    threads = [threading.Thread(target=client) for _ in range(asked.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    warm = asked.seconds / 5
    counted = [(tokens, rounds) for end, tokens, rounds in done if warm < end <= asked.seconds]
    tokens = sum(tokens for tokens, _ in counted)
    print(
        json.dumps(
            {
                "clients": asked.clients,
                "seconds": asked.seconds - warm,
                "answers": len(counted),
                "tokens_per_second": round(tokens / (asked.seconds - warm), 1),
                "accept_length": round(tokens / max(1, sum(rounds for _, rounds in counted)), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
