#!/bin/bash
#SBATCH --job-name=nerfturbo-batch
#SBATCH --requeue
# Many scenes as a job array: sbatch --array 0-15 --gpus 1 scripts/slurm_batch.sh scenes.txt FOLDER [flags of train]
# Task i takes every 16th scene; a task that is requeued goes on where it stopped.
set -euo pipefail

scenes=$1 output=$2
shift 2
exec nerfturbo batch "$scenes" --output "$output" --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" -- "$@"
