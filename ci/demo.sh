#!/usr/bin/env bash
# The main job: real text from SmolLM2-135M-Instruct through our kernels, and report/index.html with the roofline.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/setup.sh demo
exec .venv/bin/pykernels roofline --model smollm2 "$@"
