#!/bin/sh
# TaskEpilog in slurm.conf: keep the OOM reports of a job, because the run directory is in the node's memory. They go to
# torchmem-JOBID in the folder from which the job was submitted. Slurm runs this as the user of the job.
user=$(id -u)
folders=${TORCHMEM_RUN_DIR:-/run/torchmem}/$user
kept=${SLURM_SUBMIT_DIR:-$HOME}/torchmem-${SLURM_JOB_ID:?}
find "$folders" "$folders"-* -maxdepth 1 -type f -user "$user" -name '*.oom.json' 2>/dev/null |
    while read -r report; do
        grep -q "\"slurm_job_id\": *\"$SLURM_JOB_ID\"" "$report" || continue
        mkdir -p "$kept" && cp -n "$report" "$kept/"
    done
exit 0
