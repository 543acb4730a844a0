"""Starter files: configurations for `accelerate launch`, and scripts for torchrun and Slurm."""

from __future__ import annotations

from pathlib import Path

_ACCELERATE = """\
# {use}
#   accelerate launch --config_file {folder}/{name} -m retrain config.toml
# config.toml must match: {toml}
compute_environment: LOCAL_MACHINE
{own}distributed_type: {kind}
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: {processes}
rdzv_backend: static
same_network: true
use_cpu: false
"""

_FSDP2 = """\
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
"""

_TORCHRUN = """\
#!/bin/sh
# One machine:
#   sh {folder}/torchrun.sh config.toml
# Several machines: the same line on each, with NODES set to their number and HEAD to the address of the first.
# log_dir must be on a file system that all of them share.
exec torchrun --nnodes "${{NODES:-1}}" --nproc-per-node "${{PROCESSES:-{processes}}}" \\
  --rdzv-backend c10d --rdzv-endpoint "${{HEAD:-localhost}}:29500" --rdzv-id "${{RUN_ID:-retrain}}" \\
  -m retrain "$@"
"""

_SLURM = """\
#!/bin/bash
# sbatch {folder}/slurm.sh config.toml
#SBATCH --job-name=retrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={processes}
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
# A minute before the time limit, all processes get SIGTERM; rank 0 saves, and `retrain --resume` continues from there.
#SBATCH --signal=TERM@60

export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export NODES=$SLURM_NNODES RUN_ID=$SLURM_JOB_ID PROCESSES=$SLURM_GPUS_ON_NODE
exec srun sh {folder}/torchrun.sh "$@"
"""


def starter_files(folder: Path, processes: int) -> dict[str, str]:
    """The text of every file by name."""

    def accelerate(name: str, use: str, toml: str, kind: str, own: str = "") -> str:
        return _ACCELERATE.format(
            use=use, folder=folder, name=name, toml=toml, own=own, kind=kind, processes=processes
        )  # fmt: skip

    return {
        "ddp.yaml": accelerate(
            "ddp.yaml", "The full model on every GPU.", "no [distributed] table is needed", "MULTI_GPU"
        ),
        "fsdp2.yaml": accelerate(
            "fsdp2.yaml", "Layers, gradients and optimizer states sharded.", "[distributed] fsdp = true", "FSDP", _FSDP2
        ),
        "torchrun.sh": _TORCHRUN.format(folder=folder, processes=processes),
        "slurm.sh": _SLURM.format(folder=folder, processes=processes),
    }
