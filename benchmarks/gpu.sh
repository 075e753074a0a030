#!/bin/bash
# Every figure about VRAM, on a machine with an NVIDIA GPU:
#
#     benchmarks/gpu.sh [OUT [STEP...]]
#
# writes JSON and HTML into OUT (benchmarks/results) and prints the tables. Needs a built `weir`
# (WEIR says where; target/release/weir otherwise) and libvulkan1; fio for the block steps; for the
# competing job a python3 with PyTorch. A step that lacks what it needs says "SKIP step: why".
# Minutes on one H200:
#
#     calibrate     0.2  what each way costs, and what is chosen for which batch
#     ways          1    deep and large loads by each way by itself: what calibration should have found
#     large         0.5  a megabyte at a time, by way and by thread
#     rows          2    every row of SPECIFICATION.md, RUNS (3) times
#     scaling       0.5  deep loads by 1, 2, 4, ... threads
#     give_back     1.5  threads x pages of giving back, compared
#     steps         3    a daemon's memory goes and comes; another process takes 90% of the card in steps
#     coherence     0.7  10^8 pages written one way and read another
#     memory        0.3  the daemon's memory, and the card's power: idle, mapped only, with CUDA, with the kernel
#     keeper        1    SIGKILL of the daemon under load, to the first page served, with what each stage took
#     block         4    NBD over VRAM, beside nbdkit; long requests beside a server of nothing too, which is the socket alone
#     long          5.5  1 MiB at a time by one job and by four, with the window and by CUDA alone, beside nbdkit, a server of nothing
#                        and, where NBD_VRAM names its program, nbd-vram (goals: 1.0x of it by one job, 1.1x by four); LONG_SECONDS each
#     block_host    2    NBD over host memory on this machine, beside nbdkit
#     swap          3    faults from VRAM by FUSE and a loop device, beside a RAM loop, zram and a file; as root
#     page_cluster  4    the same at vm.page-cluster 0 to 5: random, in order and mixed; as root
#     commands      2    ioping, fio and dd on the same disk (benchmarks/commands); as root, ioping
#     headline      3    swap on VRAM full of live pages, and another process takes 90% of the card (benchmarks/headline); as
#                        root, TORTURE says where the lab's program is (target/release/torture)
#     queue         10   the work queue, on this machine's processors
#     striped       0.5  deep and large loads on one GPU and over all (two or more)
#     driver_load   6    NBD clients that once killed the driver's channel in most runs, by CUDA alone and with the window; fio
#     batch_sweep   3    how many copies a call to the driver may name: it crashes processes and kills channels, not the machine
#     driver_faults 3    the driver fails under a daemon, FAULTS (3) times in each of five cases (benchmarks/driver-faults); as root
#     parts         0.3  one device in four parts: processes and contexts, and what goes back to the card (benchmarks/parts); as root
#     fault         5    a program in a quarter of its memory, pages in VRAM and in host memory, beside zram and a bare handler
#                        (FAULT_SIZE, FAULT_LIMIT: 256MiB and 64MiB); as root
#     qrack         3    Qrack in a quarter and an eighth of its state, by `weir run` and by swap (benchmarks/state-vector); as root, with
#                        pyqrack-cpu in PYTHONPATH
#     state_vector  5    the same with the example state_vector, STATE_VECTOR or target/release/examples/state_vector, and a cache before the disk
#     tiered        4    16 GiB of the card before a file of 48 GiB on the disk (benchmarks/tiered); fio
#     competing     1.5  a matrix product's speed alone and beside Weir (benchmarks/competing)
#
# `quick` stands for calibrate, ways, give_back, coherence, memory and keeper. Each call prints how
# long each step took.
set -u
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
shift
steps=${*:-calibrate ways large rows scaling give_back steps coherence memory keeper block long block_host swap page_cluster commands headline queue
    striped competing}
steps=${steps/quick/calibrate ways give_back coherence memory keeper}
weir=${WEIR:-target/release/weir}
card=${CARD:-vram:0}
store=${STORE:-$card?size=24GiB}
runs=${RUNS:-3}
mkdir -p "$out"
ulimit -n "$(ulimit -Hn)"
failed=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

bench() { # NAME FLAGS... : one run of the store benchmark, with its files
    local name=$1
    shift
    "$weir" bench store --json "$out/gpu-$name.json" --report "$out/gpu-$name.html" "$@" || failed=1
}

calibrate() {
    "$weir" bench store --store "$store" --calibrate --json "$out/gpu-calibrate.json" || failed=1
}

ways() {
    for way in mapped engine ring auto; do
        echo "-- path=$way"
        "$weir" bench store --store "$card?size=8GiB&path=$way" --runs 1 --only deep --only large \
            --json "$out/gpu-way-$way.json"
    done
}

large() {
    for threads in 8 16; do
        for way in engine ring auto; do
            echo "-- path=$way, $threads threads"
            "$weir" bench store --store "$card?size=8GiB&path=$way" --runs 1 --only large --threads "$threads" \
                --json "$out/gpu-large-$way-$threads.json" 2>&1 | grep -E '^large'
        done
    done
}

rows() {
    bench store --store "$store" --runs "$runs" --coherence-seconds 1
}

scaling() {
    bench scaling --store "$card?size=8GiB" --runs 1 --only threads
}

give_back() {
    local efforts=()
    for effort in ${EFFORTS:-1x32 1x64 2x16 2x32 2x64 3x16 3x32 3x64 4x8 4x16 4x32 6x16}; do
        efforts+=(--give-back "$effort")
    done
    bench give-back --store "$store" --runs 1 --only give_back "${efforts[@]}"
}

coherence() {
    bench coherence --store "$card?size=8GiB" --runs 1 --only coherence \
        --coherence-seconds "${COHERENCE_SECONDS:-6}"
}

watts() {
    nvidia-smi --query-gpu=power.draw --format=csv,noheader,nounits -i 0 2>/dev/null | head -n 1
}

# Starts a daemon over the store $1. Prints the daemon's resident memory once it serves, and the
# card's power after two seconds.
daemon_memory() {
    local name=$1 url=$2
    "$weir" serve --store "$url" ${3:+--connections "$3"} --nbd "unix:$scratch/nbd" --control "$scratch/control" --log warn &
    local pid=$! i
    for ((i = 0; i < 200; i++)); do
        [ -S "$scratch/nbd" ] && break
        sleep 0.1
    done
    sleep 2
    awk -v name="$name" -v watts="$(watts)" '
        /^VmRSS|^RssAnon|^RssFile|^VmLck/ { seen = seen " " $1 $2 / 1024 "MiB" }
        END { print name ":" seen " power:" watts "W" }' "/proc/$pid/status" | tee -a "$out/gpu-memory.txt"
    kill "$pid"
    wait "$pid" 2>/dev/null
}

memory() {
    : > "$out/gpu-memory.txt"
    echo "nothing open: power:$(watts)W" | tee -a "$out/gpu-memory.txt"
    daemon_memory "mapped only" "$card?size=8GiB&path=mapped"
    daemon_memory "mapped only, 2 connections" "$card?size=8GiB&path=mapped" 2
    daemon_memory "with CUDA" "$card?size=8GiB&ring=off"
    daemon_memory "with CUDA and the ring" "$card?size=8GiB"
    bench power --store "$card?size=8GiB" --runs 1 --only power
}

# Gives a daemon's memory back and takes it again under load. Then another process allocates 90% of
# the card in steps of 256 MiB.
steps() {
    "$weir" bench give-back --store "$card?size=${STEPS_SIZE:-16GiB}" --size "${STEPS_SIZE:-16GiB}" --cycles "${CYCLES:-20}" \
        --json "$out/gpu-give-back-daemon.json" || failed=1
    "$weir" bench give-back --store "$card" --size "${STEPS_SIZE:-16GiB}" --cycles 0 --steps 256MiB \
        --json "$out/gpu-steps.json" || failed=1
}

keeper() {
    "$weir" bench restart --store "$card?size=9GiB" --bytes 8GiB --kills "${KILLS:-3}" \
        --json "$out/gpu-keeper.json" || failed=1
}

block() {
    command -v fio > /dev/null || { echo "SKIP block: no fio"; return; }
    # CASES: `--only qd1 --only seq` and the like; all without.
    # shellcheck disable=SC2086
    "$weir" bench block --store "$card?size=9GiB" --size 8GiB --seconds "${SECONDS_EACH:-2}" --runs 1 ${CASES:-} \
        --json "$out/gpu-block-vram.json" || failed=1
}

long() {
    command -v fio > /dev/null || { echo "SKIP long: no fio"; return; }
    "$weir" bench long --store "$card?size=9GiB" --size 8GiB --seconds "${LONG_SECONDS:-5}" --runs "$runs" \
        ${NBD_VRAM:+--nbd-vram "$NBD_VRAM"} --json "$out/gpu-long.json" || failed=1
}

block_host() {
    command -v fio > /dev/null || { echo "SKIP block_host: no fio"; return; }
    # shellcheck disable=SC2086
    "$weir" bench block --size 8GiB --seconds "${SECONDS_EACH:-2}" --runs "$runs" ${CASES:-} \
        --json "$out/gpu-block-host.json" || failed=1
}

swap() {
    [ "$(id -u)" = 0 ] || { echo "SKIP swap: needs root"; return; }
    "$weir" bench swap --store "$card?size=2GiB" --runs "$runs" --json "$out/gpu-swap.json" || failed=1
}

page_cluster() {
    [ "$(id -u)" = 0 ] || { echo "SKIP page_cluster: needs root"; return; }
    "$weir" bench swap --store "$card" --only store --only host --page-cluster 0,1,2,3,4,5 --size 1GiB --limit 256MiB --seconds 2 \
        --runs "$runs" --json "$out/gpu-page-cluster.json" || failed=1
}

commands() {
    command -v ioping > /dev/null || { echo "SKIP commands: no ioping"; return; }
    benchmarks/commands "$weir" --runs "$runs" --json "$out/gpu-commands.json" || failed=1
}

headline() {
    local torture=${TORTURE:-target/release/torture}
    [ -x "$torture" ] || { echo "SKIP headline: no $torture"; return; }
    benchmarks/headline "$weir" "$torture" --json "$out/gpu-headline.json" || failed=1
}

queue() {
    "$weir" bench queue --json "$out/queue.json" || failed=1
}

striped() {
    local gpus
    gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
    [ "$gpus" -ge 2 ] || { echo "SKIP striped: $gpus GPU"; return; }
    bench striped-one --store "vram:0?size=16GiB" --runs "$runs" --only deep --only large
    bench striped --store "vram:?size=32GiB" --runs "$runs" --only deep --only large
}

# This step runs only where it is named. COPIES and SWEEP_SECONDS set its points and their length.
batch_sweep() {
    local copies=() count
    for count in ${COPIES:-16 64 256 1024 2048}; do
        copies+=(--sweep-copies "$count")
    done
    timeout "${SWEEP_LIMIT:-400}" "$weir" bench store --store "$card" --batch-sweep "${copies[@]}" \
        --sweep-seconds "${SWEEP_SECONDS:-4}" --json "$out/gpu-batch-sweep.json" || failed=1
}

# This step runs only where it is named: 40 runs take 6 minutes.
driver_load() {
    command -v fio > /dev/null || { echo "SKIP driver_load: no fio"; return; }
    benchmarks/driver-load "$weir" --times "${TIMES:-20}" --store "$card?size=8GiB" --json "$out/gpu-driver-load.json" || failed=1
}

# This step runs only where it is named. SHIM names the built shim where there is no C compiler.
driver_faults() {
    [ "$(id -u)" = 0 ] || { echo "SKIP driver_faults: needs root"; return; }
    timeout "${FAULTS_LIMIT:-580}" benchmarks/driver-faults/run "$weir" --times "${FAULTS:-3}" --store "$card?size=4GiB" \
        ${FAULT_CASES:+--cases "$FAULT_CASES"} --json "$out/gpu-driver-faults.json" || failed=1
}

# This step runs only where it is named.
parts() {
    [ "$(id -u)" = 0 ] || { echo "SKIP parts: needs root"; return; }
    benchmarks/parts "$weir" --json "$out/gpu-parts.json" || failed=1
}

# This step runs only where it is named.
fault() {
    [ "$(id -u)" = 0 ] || { echo "SKIP fault: needs root"; return; }
    "$weir" bench fault --store "$card" --runs "$runs" --size "${FAULT_SIZE:-256MiB}" --limit "${FAULT_LIMIT:-64MiB}" \
        --only run --only run-asleep --only run-store --only run-store-asleep --only bare --only zram --json "$out/gpu-fault.json" || failed=1
}

# This step runs only where it is named.
qrack() {
    python3 -c 'import pyqrack' 2> /dev/null || { echo "SKIP qrack: no pyqrack"; return; }
    benchmarks/state-vector "$weir" --program qrack --qubits 26 --layers 4 --beside 40 --store "$card,host" --limit 128,64 \
        --way "run,${SWAPS:-zram,weir,disk,cached}" --cache 128MiB --runs "$runs" --goal 1.25 --json "$out/gpu-qrack.json" || failed=1
}

# This step runs only where it is named.
state_vector() {
    [ "$(id -u)" = 0 ] || { echo "SKIP state_vector: needs root"; return; }
    benchmarks/state-vector "$weir" --program "${STATE_VECTOR:-target/release/examples/state_vector}" --qubits 25 --gates "${GATES:-16}" \
        --store "$card,host" --limit 128,64 --way "run,${SWAPS:-zram,weir,disk,cached}" --cache 128MiB --runs "$runs" \
        --directory "${DIRECTORY:-/var/tmp}" --json "$out/gpu-state-vector.json" || failed=1
}

# This step runs only where it is named. TIERED: `--cache 4GiB --set 12GiB` and the like.
tiered() {
    command -v fio > /dev/null || { echo "SKIP tiered: no fio"; return; }
    # shellcheck disable=SC2086
    benchmarks/tiered "$weir" "${DIRECTORY:-/var/tmp}" --store "$card" ${TIERED:-} --json "$out/gpu-tiered.json" || failed=1
}

competing() {
    python3 -c 'import torch; torch.cuda.init()' 2>/dev/null || { echo "SKIP competing: no PyTorch"; return; }
    benchmarks/competing "$weir" --runs "$runs" --json "$out/gpu-competing.json" || failed=1
}

for step in $steps; do
    begun=$SECONDS
    echo "== $step"
    "$step"
    echo "== $step took $((SECONDS - begun)) s"
done
exit "$failed"
