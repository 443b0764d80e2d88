#!/bin/bash
# One task for each node; torchrun starts a process for each GPU. docs/slurm.md explains what the nodes need.
#SBATCH --job-name=train
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchmem run -- torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d \
    --rdzv-endpoint="$head:29400" train.py
