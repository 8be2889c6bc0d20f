#!/usr/bin/env bash
# TP=2 × PP=2 under torchrun: 4 ranks on this host. Extra arguments are settings (key=value).
set -euo pipefail
source "$(dirname "$0")/common.sh"
settings=(
  examples/model/tiny.yaml examples/parallel/tp2_pp2.yaml examples/data/shakespeare.yaml
  examples/recipe/quickstart.yaml run.dir=runs/tp2_pp2 "${extra[@]}"
)
python -m megabit config --quiet --world-size 4 "${settings[@]}" # one clear line, before any rank starts
exec torchrun --standalone --nproc-per-node 4 -m megabit train "${settings[@]}"
