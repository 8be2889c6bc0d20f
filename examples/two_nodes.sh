#!/usr/bin/env bash
# One job over several hosts: run this on each of them. 4 ranks a host; TP=2 × PP=2, so two hosts make DP=2.
#
#   HEAD=host0 NNODES=2 NODE_RANK=0 examples/two_nodes.sh     on host0, where the ranks meet
#   HEAD=host0 NNODES=2 NODE_RANK=1 examples/two_nodes.sh     on the other one
#
# run.dir must be a folder that the hosts share; data.dir may be, or each host prepares its own.
# HEAD may have a port (host0:29400). On hosts with several networks, GLOO_SOCKET_IFNAME or
# NCCL_SOCKET_IFNAME names the interface to use. Extra arguments are settings (key=value).
set -euo pipefail
# Asked for before anything is downloaded or written.
: "${HEAD:?set HEAD to the host (or host:port) of NODE_RANK 0}"
: "${NODE_RANK:?set NODE_RANK to 0 on HEAD and to 1, 2, ... on the others}"
source "$(dirname "$0")/common.sh"
[[ $HEAD == *:* ]] || HEAD+=:29400
NNODES=${NNODES:-2}
NPROC=${NPROC:-4}
settings=(
  examples/model/tiny.yaml examples/parallel/tp2_pp2_dp2.yaml examples/data/shakespeare.yaml
  examples/recipe/quickstart.yaml run.dir=runs/two_nodes "${extra[@]}"
)
python -m megabit config --quiet --world-size $((NNODES * NPROC)) "${settings[@]}"
# The static rendezvous is the one that looks at NODE_RANK: rank 0, which prints and writes, is on HEAD.
exec torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC" \
  --rdzv-backend static --rdzv-endpoint "$HEAD" -m megabit train "${settings[@]}"
