#!/usr/bin/env bash
# Everything that only a GPU can show, in one command and under ten minutes: builds for this GPU, checks every backend on it, runs
# compute-sanitizer, and measures against the GPU's own roof and its peers (bench/results/<gpu>.json).
#   bash ci/gpu.sh             needs Python 3.10+ with torch 2.8+ for this GPU and triton 3.4+, and a C++20 compiler
#   bash ci/gpu.sh --dry-run   prints stages, budgets and benchmarks; needs no GPU
# The torch that is installed is used, PYTHON says whose; nvcc and compute-sanitizer are taken from CUDA_HOME, PATH or PyPI (CUDA 13).
# A stage that fails or runs over its budget does not stop the others; logs are kept in build/gpu/. GPU_STAGES names the stages to run.
# Exit code: 0, or the sum of the failed stages' codes; without a GPU 64.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 64
root=$PWD

STAGES=${GPU_STAGES:-setup build correctness sanitizer benchmarks}
declare -A CODE=([setup]=1 [build]=2 [correctness]=4 [sanitizer]=8 [benchmarks]=16)
declare -A BUDGET=([setup]=50 [build]=140 [correctness]=150 [sanitizer]=70 [benchmarks]=170) # seconds, together under ten minutes
outer=${PYTHON:-python3}
venv=$root/.venv-gpu
python=$venv/bin/python
logs=$root/build/gpu
export NVIDIA_TF32_OVERRIDE=0 # some images turn TF32 on: the roof of float32 is that of float32
export PIP_RETRIES=${PIP_RETRIES:-1} PIP_DEFAULT_TIMEOUT=${PIP_DEFAULT_TIMEOUT:-8} # without a network it fails before the budget ends

# A venv that sees the packages of the Python whose torch is used, and what is missing of ours, without dependencies.
setup() {
  [ -x "$python" ] || "$outer" -m venv "$venv" || "$outer" -m venv --without-pip "$venv" || return 1 # without ensurepip: the outer pip
  "$outer" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))))' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth" || return 1
  "$python" ci/gpu_setup.py versions || return 1
  local missing
  mapfile -t missing < <("$python" ci/gpu_setup.py packages)
  [ ${#missing[@]} = 0 ] || "$python" -m pip install -q --no-deps "${missing[@]}" || return 1
  mapfile -t missing < <("$python" ci/gpu_setup.py toolkit)
  [ ${#missing[@]} = 0 ] || "$python" -m pip install -q --no-deps "${missing[@]}" ||
    echo "not installed: ${missing[*]}; without nvcc the cuda backend is not built, without compute-sanitizer nothing is sanitised"
}

# Only this GPU's architecture.
build() {
  export PYKERNELS_CUDA_ARCHS
  PYKERNELS_CUDA_ARCHS=$("$python" ci/gpu_setup.py arch) || return 1
  PYKERNELS_CUDA=auto "$python" -m pip install -q --no-deps --no-build-isolation -e . || return 1
  "$python" -m pykernels.cli doctor
}

# The device's cases compile many kernels: several processes share that. Interrupted when time is up, pytest still says what failed.
correctness() {
  local bad=0
  "$python" -m pykernels.cli check --backend cpu || bad=1
  timeout --signal=INT --kill-after=5 $((BUDGET[correctness] - 20)) "$python" -m pytest tests/test_cuda_device.py tests/test_triton.py \
    -m "not slow" -n auto --maxprocesses 8 -p no:cacheprovider || bad=$?
  return "$bad"
}

# Small shapes, the four tools at once. torch's caching allocator would hide what is out of bounds. What initcheck must see written,
# torch's kernels write: the filter that spares them the slower tools is not for it.
sanitizer() {
  local tool bad=0 filter pids=()
  command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed: nothing was checked"; return 1; }
  "$python" -c 'import sys; from pykernels.registry import backends; sys.exit(not backends()["cuda"])' ||
    { echo "the cuda backend is not available: nothing was checked"; return 1; }
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  for tool in memcheck racecheck initcheck synccheck; do
    filter=()
    [ "$tool" = initcheck ] || [ "$tool" = memcheck ] || filter=(--kernel-name kns=2pk)
    compute-sanitizer --tool "$tool" "${filter[@]}" --target-processes application-only --error-exitcode 9 --print-limit 20 \
      "$python" -m pykernels.bench.sanitize --backend cuda --seconds $((BUDGET[sanitizer] - 40)) >"$logs/$tool.log" 2>&1 &
    pids+=("$tool:$!")
  done
  for pid in "${pids[@]}"; do
    if wait "${pid#*:}"; then echo "${pid%:*}: no error"; else
      bad=1
      echo "${pid%:*}: errors"
      tail -n 60 "$logs/${pid%:*}.log"
    fi
  done
  return "$bad"
}

benchmarks() {
  "$python" -m pykernels.bench.gpu --budget $((BUDGET[benchmarks] - 20)) --checks "${GPU_CHECKS:-}"
}

if [ "${1:-}" = --dry-run ]; then
  for stage in $STAGES; do
    echo "== $stage: at most ${BUDGET[$stage]} s, exit code ${CODE[$stage]}"
    declare -f "$stage" | sed '1,2d;$d'
  done
  for python in .venv/bin/python "$python" "$outer"; do [ -x "$(command -v "$python")" ] && break; done
  exec "$python" -m pykernels.bench.gpu --list
fi

for home in "${CUDA_HOME:-/usr/local/cuda}" "$venv"/lib/python3*/site-packages/nvidia/cu13; do
  [ -d "$home/bin" ] && PATH=$PATH:$home/bin:$home/compute-sanitizer
done

# A stage runs in a process of its own, so that a budget ends it with everything that it started.
if [ -n "${GPU_STAGE:-}" ]; then
  "$GPU_STAGE"
  exit
fi

if ! nvidia-smi -L; then
  echo "there is no NVIDIA GPU (--dry-run says what would run)"
  exit 64
fi 2>/dev/null
mkdir -p "$logs"
failed=0 checks=
for stage in $STAGES; do
  echo "== $stage (at most ${BUDGET[$stage]} s)"
  start=$SECONDS
  GPU_STAGE=$stage GPU_CHECKS=$checks timeout --kill-after=5 "${BUDGET[$stage]}" bash "$root/ci/gpu.sh" 2>&1 |
    tee "$logs/$stage.log"
  code=${PIPESTATUS[0]}
  case $code in
    0) state=ok ;;
    124 | 137) state=over_budget ;;
    *) state=failed ;;
  esac
  echo "== $stage: $state, $((SECONDS - start)) s"
  checks+="${checks:+ }$stage=$state"
  [ $state = ok ] && continue
  failed=$((failed + CODE[$stage]))
  [ "$stage" = setup ] && break
done
exit $failed
