#!/bin/sh
# TaskProlog in slurm.conf: monitor every job whose environment has torchmem, without a change of its script. Slurm adds
# what this prints to the environment of the task. A job that sets TORCHMEM=0 is left alone.
[ -n "${TORCHMEM:-}" ] || echo "export TORCHMEM=1"
