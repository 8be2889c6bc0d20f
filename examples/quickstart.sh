#!/usr/bin/env bash
# Train a small ternary model on Shakespeare with TP=2 × PP=2: 4 gloo ranks on this host.
# Run it again and it goes on where it was. Extra arguments are settings, such as train.steps=500, or
# data.text=my_texts/ data.dir=data/mine run.dir=runs/mine for a text of your own.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ " $*" == *" data.text="* ]] || examples/fetch_shakespeare.sh
exec python -m megabit train --nproc-per-node 4 \
  examples/model/tiny.yaml examples/parallel/tp2_pp2.yaml \
  examples/data/shakespeare.yaml examples/recipe/quickstart.yaml "$@"
