#!/bin/bash
#SBATCH --job-name=nerfturbo
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
# One training over all nodes of a job: sbatch --nodes 2 --gpus-per-node 8 scripts/slurm_train.sh DATA --output FOLDER ...
# One torchrun agent per node; they meet at the first one, and a crashed process restarts all of them from the checkpoint.
set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")  # all of them: whoever lists them fails where nobody listens on
head=${hosts%%$'\n'*}
srun --kill-on-bad-exit=1 bash -c '
  torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$0:${RENDEZVOUS_PORT:-29500}" \
    --rdzv-conf "is_host=$([ "$SLURM_NODEID" = 0 ] && echo 1 || echo 0)" \
    -m nerfturbo train "$@"' "$head" "$@"
