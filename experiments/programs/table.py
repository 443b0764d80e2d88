"""The programs that are run: their packages at pinned versions, and how each is started."""

from __future__ import annotations

from dataclasses import dataclass

TORCH = "torch===2.13.0"


@dataclass(frozen=True, slots=True)
class Program:
    """A program from outside, run on phantom GPUs.

    Attributes:
        name: as it is listed, and how `--only` finds it.
        packages: what is installed for it, beside PyTorch; the first is the package it is about.
        words: the command. Programs are those of its environment; scripts are in `scripts/`.
        gpus: phantom GPUs that it sees.
        is_core: whether it is one of those that take five minutes together.
        torch: PyTorch, if the package needs another release.
        steps: of each rank, where the program prints no "true steps".
    """

    name: str
    packages: tuple[str, ...]
    words: tuple[str, ...]
    gpus: int = 1
    is_core: bool = False
    torch: str = TORCH
    steps: tuple[int, ...] = ()

    @property
    def requirements(self) -> tuple[str, ...]:
        """Everything that its environment has beside torchmem."""
        return (self.torch, "numpy", *self.packages)


def _script(name: str, *packages: str, script: str = "", **more: object) -> Program:
    words = ("python", f"{script or name}.py")
    return Program(name, packages, words, **more)  # type: ignore[arg-type]


TRAINERS = ("transformers==5.23.0", "accelerate==1.15.0")
TRL = ("trl==1.16.0", *TRAINERS, "datasets")
TWO_RANKS = ("torchrun", "--standalone", "--nproc-per-node", "2")

PROGRAMS = (
    _script("pytorch", script="train", is_core=True),
    _script("torch.optim.Muon", script="muon"),
    _script("transformers Trainer", *TRAINERS, script="transformers_trainer", is_core=True),
    _script("TRL SFT", *TRL, script="trl_sft", is_core=True),
    _script("TRL DPO", *TRL, script="trl_dpo"),
    _script("TRL GRPO", *TRL, script="trl_grpo"),
    _script("PEFT", "peft", *TRAINERS, script="peft_lora"),
    Program(
        "accelerate launch",
        TRAINERS,
        ("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "accelerate_loop.py"),
        gpus=2,
        is_core=True,
    ),
    Program(
        "DeepSpeed",
        ("deepspeed==0.19.8",),
        (*TWO_RANKS, "deepspeed_engine.py"),
        gpus=2,
    ),
    _script("Lightning", "lightning==2.6.6", script="lightning_fit", is_core=True),
    _script("fastai", "fastai==2.8.12", script="fastai_learner"),
    _script("sentence-transformers", "sentence-transformers", *TRAINERS, script="sentence"),
    _script("Opacus", "opacus", script="opacus_private"),
    _script("stable-baselines3", "stable-baselines3", script="ppo", is_core=True),
    _script("Pyro", "pyro-ppl", script="pyro_svi"),
    _script("bitsandbytes", "bitsandbytes", script="bitsandbytes_adam"),
    _script("schedulefree", "schedulefree", script="schedulefree_adamw"),
    _script("RMM", "rmm-cu13==26.10.0", script="rmm_pool"),
    _script("torchao", "torchao", script="torchao_adam"),
    _script("timm", "timm==1.0.31", script="timm_resnet"),
    _script("skorch", "skorch", script="skorch_classifier"),
    _script("PyTorch Geometric", "torch_geometric", script="geometric"),
    _script("TorchRL", "torchrl", "tensordict", script="torchrl_policy"),
    _script("diffusers", "diffusers", script="diffusers_unet"),
    _script("OpenCLIP", "open_clip_torch", script="open_clip_rn50"),
    _script("kornia", "kornia", script="kornia_augmentation"),
    _script("MONAI", "monai", script="monai_unet"),
    _script("ultralytics", "ultralytics", "opencv-python-headless", script="ultralytics_yolo"),
    _script("Composer", "mosaicml==0.32.1", script="composer_trainer", torch="torch===2.7.0"),
    _script("torchmetrics", "torchmetrics", script="torchmetrics_loop"),
    _script("PyTorch Ignite", "pytorch-ignite", script="ignite_trainer"),
    Program("Megatron core", ("megatron-core",), (*TWO_RANKS, "megatron_gpt.py"), gpus=2),
    Program("torchrun", TRAINERS, (*TWO_RANKS, "accelerate_loop.py"), gpus=2),
    _script("Ray Train", "ray[train]", script="ray_train", gpus=2),
    _script("Dask", "distributed", script="dask_task"),
    _script("joblib", "joblib", script="joblib_tasks", is_core=True),
    _script("submitit", "submitit", script="submitit_job"),
    _script("papermill", "papermill", "ipykernel", script="papermill_run"),
    Program("IPython", ("ipython",), ("ipython", "--no-banner", "train.py")),
    Program(
        "pytest-xdist",
        ("pytest-xdist", "pytest"),
        ("pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "test_training.py"),
        is_core=True,
        steps=(8,),
    ),
    Program("coverage", ("coverage",), ("coverage", "run", "train.py"), is_core=True),
    Program("memray", ("memray",), ("memray", "run", "-q", "-o", "memray.bin", "train.py")),
    Program("VizTracer", ("viztracer",), ("viztracer", "--quiet", "train.py")),
    Program(
        "py-spy",
        ("py-spy",),
        ("py-spy", "record", "-o", "spy.svg", "--", "python", "train.py"),
    ),
    Program("Scalene", ("scalene",), ("scalene", "run", "--off", "train.py")),
    Program("debugpy", ("debugpy",), ("python", "-m", "debugpy", "--listen", "0", "train.py")),
    Program("cProfile", (), ("python", "-m", "cProfile", "-o", "profile", "train.py")),
    _script("Weights & Biases", "wandb", script="wandb_offline", is_core=True),
    _script("MLflow", "mlflow", script="mlflow_local"),
    _script("Comet", "comet_ml", script="comet_offline"),
    _script("ClearML", "clearml", script="clearml_offline"),
    _script("Neptune", "neptune", script="neptune_offline"),
    _script("pytorch_memlab", "pytorch_memlab", script="memlab_reporter"),
    Program("TraceML", ("traceml-ai==0.5.0",), ("traceml", "run", "train.py")),
    _script("Stormlog", "stormlog==0.4.3", script="stormlog_tracker"),
    _script("nvitop", "nvitop==1.7.2", script="nvitop_collector"),
    _script("codecarbon", "codecarbon==3.3.2", script="codecarbon_tracker"),
    _script("torch.profiler", script="profiler_trace"),
    _script("own memory history", script="memory_history"),
    _script(
        "those five together",
        "stormlog==0.4.3",
        "pytorch_memlab",
        "nvitop==1.7.2",
        "codecarbon==3.3.2",
        script="peers_together",
    ),
    Program("New Relic", ("newrelic==14.1.0",), ("newrelic-admin", "run-python", "train.py")),
    Program("Datadog", ("ddtrace==4.16.0",), ("ddtrace-run", "python", "train.py")),
    Program(
        "OpenTelemetry",
        ("opentelemetry-distro==0.66b2",),
        ("opentelemetry-instrument", "python", "train.py"),
    ),
)
