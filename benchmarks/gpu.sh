#!/bin/bash
# Every figure about VRAM in one call, on a machine with an NVIDIA GPU:
#
#     benchmarks/gpu.sh [OUT]
#
# writes OUT/store.json (and .html), OUT/calibrate.json, and prints the tables. Needs a built `weir` (WEIR says where;
# target/release/weir otherwise), libvulkan1, and for the competing job a python3 with PyTorch.
# The full scale of the coherence row (10^8 pages) is COHERENCE_SECONDS=15.
set -u
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
weir=${WEIR:-target/release/weir}
store=${STORE:-vram:0?size=24GiB}
mkdir -p "$out"
ulimit -n "$(ulimit -Hn)"

echo "== what each path costs"
"$weir" bench store --store "$store" --calibrate --json "$out/calibrate.json"
echo "== rows"
"$weir" bench store --store "$store" --runs "${RUNS:-3}" --coherence-seconds "${COHERENCE_SECONDS:-2}" \
    --json "$out/store.json" --report "$out/store.html"
code=$?

# A competing job: matrix products for some seconds, alone and beside a store under load.
if python3 -c 'import torch; torch.cuda.init()' 2>/dev/null; then
    echo "== a matrix product's speed, alone and beside Weir"
    job() {
        python3 - <<'PY'
import time
import torch
a = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16)
b = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16)
for _ in range(20):
    a @ b
torch.cuda.synchronize()
begun, count = time.time(), 0
while time.time() - begun < 4:
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    count += 10
print(f'{count * 2 * 8192**3 / (time.time() - begun) / 1e12:.1f} TFLOP/s')
PY
    }
    echo "alone: $(job)"
    for ring in off auto; do
        "$weir" bench store --store "vram:0?size=8GiB&ring=$ring" --hold 14 2> "$out/hold-$ring.txt" &
        pid=$!
        sleep 3
        echo "beside 100 k pages/s, ring=$ring: $(job)"
        wait "$pid"
        tail -n 1 "$out/hold-$ring.txt"
    done
fi
exit "$code"
