#!/usr/bin/env bash
# All ranks on this host: NPROC of them, by default one for each GPU, and 4 without any.
#
#   examples/launch/one_host.sh data.text=my_texts/
#
# If a rank fails, all are started again from the newest checkpoint, 3 times at most. SIGTERM saves and
# ends with code 75: the same command goes on from there. Arguments are settings (key=value, *.yaml).
set -euo pipefail
source "$(dirname "$0")/../common.sh"
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || gpus=0
NPROC=${NPROC:-$((gpus > 0 ? gpus : 4))}
settings=(
  examples/model/tiny.yaml examples/parallel/tp2_pp2.yaml examples/data/shakespeare.yaml
  examples/recipe/quickstart.yaml run.dir=runs/one_host "${extra[@]}"
)
# exec: a signal to this script's process is one to the launcher, which passes it on and waits.
exec python -m megabit train "${settings[@]}" --nproc-per-node "$NPROC" --max-restarts 3
