#!/usr/bin/env bash
# sbatch examples/slurm.sh CONFIG [key=value ...]
#
# Train on two nodes, and go on in a new job for as long as it takes: a run that was stopped early has saved, and exits
# with 75; the job is then put back into the queue. Needs Slurm, eight GPUs a node, and a working directory on a disk
# that all nodes see, where `ckptrain` is on PATH (or set CKPTRAIN).
#
# Nothing has to be signalled: a run reads SLURM_JOB_END_TIME and stops in time for its save. It also stops for the
# SIGTERM of a preemption, where the cluster leaves it enough grace for a step and a save.

#SBATCH --job-name=ckptrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=ckptrain-%j.log

set -u
stopped_early=75

# One process for each GPU. When the first has ended, the others have five minutes: after a stop they end within seconds,
# and where one has failed they would wait for it. They are not killed at once, which would hide the status 75.
srun --kill-on-bad-exit=0 --wait=300 "${CKPTRAIN:-ckptrain}" run "$@"
status=$?

if ((status == stopped_early)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
