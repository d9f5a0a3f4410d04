#!/usr/bin/env bash
# Sets up, lints and tests everything that needs no GPU. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYKERNELS_CPU_LEVELS=${PYKERNELS_CPU_LEVELS-$([ "$(uname -m)" = x86_64 ] && echo scalar,avx2,avx512,emulated512 || echo scalar)}
source ci/setup.sh test
bash ci/lint.sh
exec .venv/bin/python -m pytest -m "not slow" -n auto --dist loadfile "$@"
