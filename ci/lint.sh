#!/usr/bin/env bash
# ruff (lint and format), mypy, clang-format. --fix rewrites the files.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
mapfile -t native < <(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
if [ "${1:-}" = --fix ]; then
  $bin/ruff check -q --fix .
  $bin/ruff format -q .
  $bin/clang-format -i "${native[@]}"
fi
$bin/ruff check .
$bin/ruff format --check .
$bin/mypy
$bin/clang-format --dry-run --Werror "${native[@]}"
echo "lint: ok"
