#!/bin/sh
# Runs the tests that need an NVIDIA card, in this folder, on a machine without Rust. One test at a time: they share the card.
#   sh run.sh [--cases N] [--seconds S] [--seed S] [--only kernels|engine|broken]
# The search for a job that is not bit-equal to its solo run takes N cases (24) in each precision and starts no more after S seconds (600).
# That every kernel compiles for every architecture is checked elsewhere: it needs no card. Compiled kernels are kept in cache/.
# NODUS_CUDA_LIBRARIES names folders that hold NVRTC and cuBLASLt, separated by colons; else those of python3's wheels are looked in.
set -eu
cd "$(dirname "$0")"
only=all
while [ $# -gt 0 ]; do
    case "$1" in
    --cases) export NODUS_TEST_CASES="$2" ;;
    --seconds) export NODUS_TEST_SECONDS="$2" ;;
    --seed) export NODUS_TEST_SEED="$2" ;;
    --only) only="$2" ;;
    *) echo "run.sh: unknown option $1; see its head" >&2; exit 2 ;;
    esac
    shift 2
done
if [ -z "${NODUS_CUDA_LIBRARIES:-}" ]; then
    NODUS_CUDA_LIBRARIES=$(python3 -c 'import sys, glob
print(":".join(folder for path in sys.path for folder in sorted(glob.glob(path + "/nvidia/*/lib"))))' 2>/dev/null || true)
    export NODUS_CUDA_LIBRARIES
fi
mkdir -p cache
export NODUS_REQUIRE_CUDA=1 NODUS_GOLDEN="$PWD/golden" NODUS_CUDA_CACHE="$PWD/cache"
failed=0
# Each executable runs to its end, so that one failure hides no other.
tests() {
    echo "==> $*"
    start=$(date +%s)
    "$@" --test-threads=1 --nocapture || failed=1
    echo "    $1: $(($(date +%s) - start)) s"
}
chmod +x kernels kernels-broken kernels-gate-up engine engine-broken
if [ "$only" = all ] || [ "$only" = kernels ]; then tests ./kernels --skip compile; fi
if [ "$only" = all ] || [ "$only" = engine ]; then tests ./engine cuda::; fi
if [ "$only" = all ] || [ "$only" = broken ]; then
    tests ./kernels-broken broken_kernel
    tests ./kernels-gate-up broken_gate_up
    tests ./engine-broken cuda::
fi
exit $failed
