#!/usr/bin/env bash
# Every gate on speed that needs no GPU: the CPU kernels against a revision (default: the commit before), their instructions and
# their shares of the roof against bench/baselines, Triton's machine code and, where nvcc is found, CUDA's against the committed
# figures. Writes markdown, and fails when one of them does. Needs valgrind. Usage: ci/gate.sh [REVISION [OPTION OF pykernels gate...]]
set -uo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || { source ci/setup.sh test; }
failed=0
gate() { printf '\n### %s\n\n' "$1"; shift; "$@" || failed=1; }
fenced() { echo '```'; "$@"; local code=$?; echo '```'; return $code; }
pykernels() { .venv/bin/python -m pykernels.cli "$@"; }
gate "CPU kernels" pykernels gate "${1:-HEAD~1}" . --markdown "${@:2}"
if [ "$(uname -m)" = x86_64 ]; then  # the level that is counted, whatever this machine runs
  gate "Build" env PYKERNELS_CUDA=0 PYKERNELS_CPU_LEVELS=avx2 .venv/bin/python setup.py -q build_ext --inplace
fi
gate "Instructions" pykernels baseline instructions --markdown
gate "Shares of the roof" pykernels baseline roof --markdown
gate "Triton" fenced .venv/bin/python ci/compile_matrix.py --quick
if command -v nvcc >/dev/null; then gate "CUDA" fenced bash ci/build_cuda.sh; else echo "CUDA: not gated, nvcc is not on PATH"; fi
exit $failed
