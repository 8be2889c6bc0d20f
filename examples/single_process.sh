#!/usr/bin/env bash
# The same model in one process, without a launcher. Extra arguments are settings (key=value).
set -euo pipefail
source "$(dirname "$0")/common.sh"
exec python -m megabit train \
  examples/model/tiny.yaml examples/parallel/single.yaml examples/data/shakespeare.yaml \
  examples/recipe/quickstart.yaml run.dir=runs/single "${extra[@]}"
