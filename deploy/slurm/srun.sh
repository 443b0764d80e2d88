#!/bin/bash
# One task for each GPU. Install torchmem in the job's environment; docs/slurm.md explains what the nodes need.
#SBATCH --job-name=train
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8
srun torchmem run -- python train.py
