#!/usr/bin/env bash
# One job over several hosts: run this on each of them, in any order. NPROC ranks a host, by default 4.
#
# Elastic: NNODES is the least and the most hosts. Training begins with those that are there; when one is lost,
# or comes, all ranks start again from the newest checkpoint with another DP, and the same data order.
#   HEAD=host0 NNODES=1:4 examples/launch/n_hosts.sh
#
# Static: as many hosts as NNODES says, numbered, so that rank 0, which prints and writes, is on HEAD.
#   HEAD=host0 NNODES=2 NODE_RANK=0 examples/launch/n_hosts.sh    on host0
#   HEAD=host0 NNODES=2 NODE_RANK=1 examples/launch/n_hosts.sh    on the other one
#
# HEAD (with a port: host0:29400) is where ranks meet: a host that all can reach, and the one that an
# elastic job cannot lose. run.dir must be a folder that the hosts share; data.dir may be, or each host
# prepares its own. Hosts with several networks: see examples/site. Arguments are settings.
set -euo pipefail
# Asked for before anything is downloaded or written.
: "${HEAD:?set HEAD to the host (or host:port) where ranks meet}"
source "$(dirname "$0")/../common.sh"
[[ $HEAD == *:* ]] || HEAD+=:29400
settings=(
  examples/model/tiny.yaml examples/parallel/tp2_pp2_dp2.yaml examples/data/shakespeare.yaml
  examples/recipe/quickstart.yaml run.dir=runs/n_hosts "${extra[@]}"
)
launch=(--nproc-per-node "${NPROC:-4}" --nnodes "${NNODES:-1:4}" --rdzv-endpoint "$HEAD" --max-restarts "${MAX_RESTARTS:-3}")
[[ -z ${NODE_RANK:-} ]] || launch+=(--node-rank "$NODE_RANK")
# torchrun does the same: torchrun --rdzv-backend c10d (or static) with these options, -m megabit train SETTINGS.
# It leaves a save 30 s when it is told to stop; this launcher waits as long as it takes.
exec python -m megabit train "${settings[@]}" "${launch[@]}"
