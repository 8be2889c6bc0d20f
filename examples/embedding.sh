#!/usr/bin/env bash
# Sentence embeddings: a small ternary model learns from scratch which passages of Shakespeare's plays are neighbours.
# One process; ten minutes. Extra arguments are settings, such as train.steps=4000.
set -euo pipefail
source "$(dirname "$0")/common.sh"
exec python -m megabit train \
  examples/model/tiny.yaml examples/data/shakespeare.yaml examples/recipe/embedding.yaml \
  train.steps=300 train.eval_interval=100 "${extra[@]}"
