#!/usr/bin/env bash
# Train a small ternary model on Shakespeare with TP=2 × PP=2: 4 gloo ranks on this host.
# Run it again and it goes on where it was. Extra arguments are settings, such as train.steps=1000, or
# data.text=my_texts/ for a text of your own (in data/own, runs/own; data.dir and run.dir name others).
set -euo pipefail
source "$(dirname "$0")/common.sh"
exec python -m megabit train --nproc-per-node 4 \
  examples/model/tiny.yaml examples/parallel/tp2_pp2.yaml \
  examples/data/shakespeare.yaml examples/recipe/quickstart.yaml "${extra[@]}"
