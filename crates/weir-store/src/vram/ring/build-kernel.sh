#!/bin/sh
# Compiles kernel.cu to kernel.ptx. Needs clang with the NVPTX target (Debian's and Ubuntu's have
# it), no CUDA. The PTX is for compute capability 7.0 and every later one: the driver compiles it
# for the card that is there. Its first line records the CRC-32C of the source, which a test
# compares with the source beside it.
set -eu
cd "$(dirname "$0")"
sum=$(python3 - kernel.cu <<'PY'
import sys
crc = 0xffffffff
for byte in open(sys.argv[1], 'rb').read():
    crc ^= byte
    for _ in range(8):
        crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
print(f'{crc ^ 0xffffffff:08x}')
PY
)
{
    echo "// kernel.cu $sum, $(clang --version | head -n 1)"
    clang -x cuda --cuda-device-only --cuda-gpu-arch=sm_70 -Xclang -target-feature -Xclang +ptx63 -nocudainc -nocudalib -O2 -S -o - kernel.cu
} > kernel.ptx
