#!/usr/bin/env bash
# Compiles the CUDA module for every architecture (PYKERNELS_CUDA_ARCHS) with no GPU, and holds registers, spills and machine code
# against ci/cuda_figures.json. --write replaces the figures. Needs nvcc 13.0: another compiler makes other code.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYKERNELS_CUDA=1 PYKERNELS_CPU_LEVELS=${PYKERNELS_CPU_LEVELS-}
[ -x .venv/bin/python ] || source ci/setup.sh test
.venv/bin/python setup.py -q build_ext --inplace
exec .venv/bin/python ci/cuda_figures.py "$@"
