#!/usr/bin/env bash
# mpirun of Open MPI, MPICH or Intel MPI starts every rank. MPI is only the launcher: ranks talk over gloo or
# NCCL. Run it on the first host of MPI_OPTIONS, which go to mpirun as they are:
#
#   NRANKS=16 MPI_OPTIONS="--hostfile hosts" examples/launch/mpi.sh data.text=/shared/my_texts
#
# Run by hand on one host with Open MPI 5.0 and MPICH 5.0, and with a stand-in for mpirun in
# tests/test_launch_files.py; never on a real cluster. To stop and save, send SIGTERM to one rank, which is
# enough for all (megabit inject signal RUN_DIR term --rank 0): one to mpirun leaves ranks only a few seconds.
set -euo pipefail
source "$(dirname "$0")/../common.sh"
NRANKS=${NRANKS:-4}
# Ranks know their numbers from OMPI_COMM_WORLD_RANK or PMI_RANK; where rank 0 listens no MPI tells them.
export MASTER_ADDR=${MASTER_ADDR:-$(hostname)} MASTER_PORT=${MASTER_PORT:-29400}
settings=(
  examples/model/tiny.yaml examples/parallel/tp2_pp2.yaml examples/data/shakespeare.yaml
  examples/recipe/quickstart.yaml run.dir=runs/mpi "${extra[@]}"
)
python -m megabit config --quiet --world-size "$NRANKS" "${settings[@]}" # one clear line, before any rank starts
if mpirun --version 2>&1 | grep -q 'Open MPI'; then
  # Open MPI hands on only the variables that are named, and binds a rank to one core unless told not to.
  kind=(--bind-to none)
  for name in MASTER_ADDR MASTER_PORT OMP_NUM_THREADS PATH; do kind+=(-x "$name"); done
else
  kind=() # MPICH and Intel MPI hand on all of them
fi
read -ra options <<<"${MPI_OPTIONS:-}"
exec mpirun -n "$NRANKS" "${kind[@]}" "${options[@]}" python -m megabit train "${settings[@]}"
