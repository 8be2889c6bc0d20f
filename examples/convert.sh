#!/usr/bin/env bash
# A dense model becomes ternary: train a small dense one on Shakespeare (LLaMA's architecture, in runs/dense), then
# convert it with the recipe (runs/convert). One process; a quarter of an hour. Extra arguments are settings of both
# runs; DENSE names another folder for the dense one.
set -euo pipefail
source "$(dirname "$0")/common.sh"
dense=${DENSE:-runs/dense}
small=(
  examples/model/tiny.yaml examples/data/shakespeare.yaml model.hidden_act=silu
  train.global_batch_size=16 train.micro_batch_size=4 optim.warmup_steps=20 precision.compute=float32
)
python -m megabit train examples/recipe/quickstart.yaml "${small[@]}" \
  model.linear=dense model.norm_placement=prenorm optim.schedule=linear 'optim.lr=[2e-3]' 'optim.weight_decay=[0.1]' \
  "${extra[@]}" "run.dir=$dense"
exec python -m megabit train examples/recipe/convert.yaml "${small[@]}" \
  train.tokens=null train.steps=300 train.log_interval=20 train.eval_interval=100 train.eval_samples=64 \
  'optim.lr=[1e-3]' 'run.sample_prompt="ROMEO:"' "${extra[@]}" "run.init_from=$dense" "loss.teacher=$dense"
