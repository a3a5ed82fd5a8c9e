#!/usr/bin/env bash
# The steps of action.yml: `run.sh key`, `run.sh setup`, `run.sh run`, in this order, in the folder of the job. Inputs are IN_…
# variables. Outside of GitHub, which a missing $GITHUB_OUTPUT tells, nothing is written but eagletwin-runs/.
set -euo pipefail
shopt -s inherit_errexit  # else `key` would go on where Python is missing
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${IN_PYTHON:-python3.11}

output() { if [ -n "${GITHUB_OUTPUT:-}" ]; then echo "$1=$2" >> "$GITHUB_OUTPUT"; fi; }

# What the environment is made of: an environment under another key is made anew.
key() { { "$python" -VV; uname -m; echo "${IN_TORCH:-}"; cat "$root"/requirements/{engine,dev}.lock "$root"/{Makefile,pyproject.toml}; } | sha256sum | cut -c1-16; }

case "${1:-}" in
  key)
    key=$(key)
    output key "$key"
    echo "$key"
    ;;
  setup)
    key=$(key)
    # a cache keeps the time of .ready, which a fresh checkout's lists are newer than
    if [ "$(cat "$root/.venv/.key" 2> /dev/null)" = "$key" ]; then touch "$root/.venv/.ready"; fi
    make -C "$root" setup "PYTHON=$python" ${IN_TORCH:+"TORCH=$IN_TORCH"}
    echo "$key" > "$root/.venv/.key"
    ;;
  run)
    if [ -n "${IN_SGLANG:-}" ] && [ -n "${IN_VLLM:-}" ]; then
      echo "error: sglang $IN_SGLANG and vllm $IN_VLLM: one engine runs" >&2
      echo "  so:  nothing was run" >&2
      echo "  try: leave one of them out" >&2
      exit 128
    fi
    words=(${IN_SGLANG:+"$IN_SGLANG"} ${IN_VLLM:+"$IN_VLLM" --engine vllm} --minutes "${IN_MINUTES:-10}" --seed "${IN_SEED:-0}")
    if [ -n "${IN_BASE:-}" ]; then words+=(--base "$IN_BASE"); fi
    if [ -n "${IN_HISTORY:-}" ]; then words+=(--history "$IN_HISTORY"); fi
    if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then words+=(--summary "$GITHUB_STEP_SUMMARY"); fi
    set -f  # words of an input are names, and no patterns for files
    for family in ${IN_FAMILIES:-}; do words+=(--family "$family"); done
    for entry in ${IN_LEDGER:-all}; do words+=(--ledger "$entry"); done
    code=0
    "$root/.venv/bin/eagletwin" compare "${words[@]}" || code=$?
    output exit-code "$code"
    exit "$code"
    ;;
  *)
    echo "error: run.sh takes key, setup or run, and not '${1:-}'" >&2
    echo "  so:  nothing was run" >&2
    echo "  try: run.sh setup && run.sh run" >&2
    exit 128
    ;;
esac
