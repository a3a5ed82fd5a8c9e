#!/bin/bash
# From the root of the checkout, on an H200: BUNDLE=folder of the bundle, OUT=an empty folder. Some 9 minutes.
: "${BUNDLE:=build/bundle}"
: "${OUT:=/tmp/v4-out}"
mkdir -p "$OUT"; exec > >(tee "$OUT/all.log") 2>&1
BEGAN=$(date +%s); say() { echo "[$(( $(date +%s) - BEGAN )) s] $*"; }
ROOT=$PWD
. "$BUNDLE/setup.sh" || { say "no bundle"; exit 1; }
export PYTHONPATH="$ROOT/src:$PYTHONPATH"      # this checkout, not the bundle's
W=$(mktemp -d); cp -rs "$EAGLETWIN_WEIGHTS"/. "$W"/ 2>/dev/null; KEPT=$EAGLETWIN_WEIGHTS
say unpacked; nvidia-smi -L; python3 -V
python3 -c 'import eagletwin, sys; print(eagletwin.__file__)'
env -u EAGLETWIN_WEIGHTS python3 - "$W" <<'P' || say "no weights"
import sys
from pathlib import Path
from safetensors.torch import save_file
from eagletwin.harness.families.weights import model_pair
for name in ("deepseek-v4", "deepseek-dsa"):
    to = Path(sys.argv[1]) / f"{name}.safetensors"
    if name == "deepseek-dsa" and to.exists(): continue
    to.unlink(missing_ok=True); pair = model_pair(name)
    save_file({f"{p}.{n}": t for p, ts in (("target", pair.target), ("draft", pair.draft)) for n, t in ts.items()}, str(to))
    print("weights", name, pair.digest[:12])
P
export EAGLETWIN_WEIGHTS=$W
python3 - "$OUT" <<'P'
import sys
from pathlib import Path
import msgspec
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.families.dimensions.dimension import tokens
def write(name, model, page, *requests, total=4096, chunk=256, steps=3):
    case = Case(name=name, model=model, num_steps=steps, page_size=page, chunked_prefill_size=chunk, requests=requests, engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=total)))
    Path(sys.argv[1], f"{name}.json").write_bytes(msgspec.json.encode(case))
L = tokens(3, 300, 96)
write("v4-small", "deepseek-v4", 256, Request(id="a", prompt=(5, 9, 33, 12, 7, 80, 41, 22, 3), max_new_tokens=12), Request(id="b", prompt=(1, 2, 3, 4, 5), max_new_tokens=9, arrive=1))
write("v4-big", "deepseek-v4", 256, Request(id="a", prompt=L, max_new_tokens=10), Request(id="b", prompt=tokens(5, 120, 96), max_new_tokens=14), Request(id="c", prompt=(*L[:270], 9, 4), max_new_tokens=4, arrive=14), Request(id="d", prompt=tokens(7, 3, 96), max_new_tokens=8, arrive=2))
write("dsa", "deepseek-dsa", 64, Request(id="a", prompt=L[:70], max_new_tokens=8), Request(id="b", prompt=tokens(5, 19, 96), max_new_tokens=8), total=1024, chunk=512)
P
V="--device cuda --dtype bfloat16 --step-timeout 400 --case-timeout 450 --out $OUT/runs"
go() { # name, limit, command
  local name=$1 limit=$2; shift 2; say "begin $name"
  timeout -k 5 "$limit" "$@" > "$OUT/$name.log" 2>&1; say "end $name: exit $?"; tail -n 25 "$OUT/$name.log" | sed "s/^/  $name: /"
}
E1="python3 -m eagletwin"
v4() {
  go v4-small-eager 420 $E1 check "$OUT/v4-small.json" $V --graphs none --no-overlap --remedy dsv4-draft-reads-worker
  go v4-small-released 100 $E1 check "$OUT/v4-small.json" $V --graphs none --no-overlap &
  go v4-big-eager 140 $E1 check "$OUT/v4-big.json" $V --graphs none --remedy dsv4-draft-reads-worker &
  go v4-big-graphs 140 $E1 check "$OUT/v4-big.json" $V --graphs 1,2,4 --remedy dsv4-draft-reads-worker &
  go v4-prove 140 $E1 prove 26239-worker dsv4-draft-reads-worker --device cuda --dtype bfloat16 --graphs none --no-overlap --out "$OUT/runs" &
  wait
  go v4-fuzz-eager 150 $E1 fuzz --device cuda --dtype bfloat16 --graphs none --only deepseek-v4 --cases 100 --minutes 2 -n 4 --out "$OUT/runs" &
  go v4-fuzz-graphs 150 $E1 fuzz --device cuda --dtype bfloat16 --graphs 1,2,4 --only deepseek-v4 --cases 50 --minutes 2 -n 2 --out "$OUT/runs" &
  wait
}
dsa() {
  go dsa-eager 300 $E1 check "$OUT/dsa.json" $V --graphs none --no-overlap --remedy dsa-draft-reads-worker
  go dsa-prove 140 $E1 prove dsa-draft-reads-worker --device cuda --dtype bfloat16 --graphs none --no-overlap --out "$OUT/runs"
  go dsa-fuzz 120 $E1 fuzz --device cuda --dtype bfloat16 --graphs none --only deepseek-dsa --cases 50 --minutes 1.5 -n 2 --out "$OUT/runs"
}
v4 & dsa & wait
say done; find "$OUT/runs" -name '*.safetensors' -delete; find "$OUT" -type f | wc -l; du -sh "$OUT"
