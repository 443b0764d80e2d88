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
TRL = ("trl==1.16.0", *TRAINERS, "datasets==5.2.0")
TWO_RANKS = ("torchrun", "--standalone", "--nproc-per-node", "2")

PROGRAMS = (
    _script("pytorch", script="train", is_core=True),
    _script("torch.optim.Muon", script="muon"),
    _script("transformers Trainer", *TRAINERS, script="transformers_trainer", is_core=True),
    _script("TRL SFT", *TRL, script="trl_sft", is_core=True),
    _script("TRL DPO", *TRL, script="trl_dpo"),
    _script("TRL GRPO", *TRL, script="trl_grpo"),
    _script("PEFT", "peft==0.21.2", *TRAINERS, script="peft_lora"),
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
    _script("sentence-transformers", "sentence-transformers==6.2.0", *TRAINERS, script="sentence"),
    _script("Opacus", "opacus==1.6.0", script="opacus_private"),
    _script("stable-baselines3", "stable-baselines3==2.9.2", script="ppo", is_core=True),
    _script("Pyro", "pyro-ppl==1.9.2", script="pyro_svi"),
    _script("bitsandbytes", "bitsandbytes==0.50.2", script="bitsandbytes_adam"),
    _script("schedulefree", "schedulefree==1.4.1", script="schedulefree_adamw"),
    _script("RMM", "rmm-cu13==26.10.0", script="rmm_pool"),
    _script("torchao", "torchao==0.18.0", script="torchao_adam"),
    _script("timm", "timm==1.0.31", script="timm_resnet"),
    _script("skorch", "skorch==1.4.0", script="skorch_classifier"),
    _script("PyTorch Geometric", "torch_geometric==2.8.1", script="geometric"),
    _script("TorchRL", "torchrl==0.14.1", "tensordict==0.14.3", script="torchrl_policy"),
    _script("diffusers", "diffusers==0.42.1", script="diffusers_unet"),
    _script("OpenCLIP", "open_clip_torch==3.3.0", script="open_clip_rn50"),
    _script("kornia", "kornia==0.9.0", script="kornia_augmentation"),
    _script("MONAI", "monai==1.6.1", script="monai_unet"),
    _script(
        "ultralytics",
        "ultralytics==8.4.190",
        "opencv-python-headless==5.0.0.93",
        script="ultralytics_yolo",
    ),
    _script("Composer", "mosaicml==0.32.1", script="composer_trainer", torch="torch===2.7.0"),
    _script("torchmetrics", "torchmetrics==1.9.0", script="torchmetrics_loop"),
    _script("PyTorch Ignite", "pytorch-ignite==0.5.5", script="ignite_trainer"),
    Program("Megatron core", ("megatron-core==0.16.1",), (*TWO_RANKS, "megatron_gpt.py"), gpus=2),
    Program("torchrun", TRAINERS, (*TWO_RANKS, "accelerate_loop.py"), gpus=2),
    _script("Ray Train", "ray[train]==2.60.0", script="ray_train", gpus=2),
    _script("Dask", "distributed==2026.8.0", script="dask_task"),
    _script("joblib", "joblib==1.6.0", script="joblib_tasks", is_core=True),
    _script("submitit", "submitit==1.5.4", script="submitit_job"),
    _script("papermill", "papermill==2.7.0", "ipykernel==7.4.0", script="papermill_run"),
    Program("IPython", ("ipython==9.18.1",), ("ipython", "--no-banner", "train.py")),
    Program(
        "pytest-xdist",
        ("pytest-xdist==3.8.0", "pytest==9.2.0"),
        ("pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "test_training.py"),
        is_core=True,
        steps=(8,),
    ),
    Program("coverage", ("coverage==7.17.5",), ("coverage", "run", "train.py"), is_core=True),
    Program("memray", ("memray==1.20.0",), ("memray", "run", "-q", "-o", "memray.bin", "train.py")),
    Program("VizTracer", ("viztracer==1.1.1",), ("viztracer", "--quiet", "train.py")),
    Program(
        "py-spy",
        ("py-spy==0.4.3",),
        ("py-spy", "record", "-o", "spy.svg", "--", "python", "train.py"),
    ),
    Program("Scalene", ("scalene==2.4.0",), ("scalene", "run", "--off", "train.py")),
    Program(
        "debugpy", ("debugpy==1.8.22",), ("python", "-m", "debugpy", "--listen", "0", "train.py")
    ),
    Program("cProfile", (), ("python", "-m", "cProfile", "-o", "profile", "train.py")),
    _script("Weights & Biases", "wandb==0.31.0", script="wandb_offline", is_core=True),
    _script("MLflow", "mlflow==3.17.2", script="mlflow_local"),
    _script("Comet", "comet_ml==3.58.8", script="comet_offline"),
    _script("ClearML", "clearml==2.1.12", script="clearml_offline"),
    _script("Neptune", "neptune==1.14.0.post2", script="neptune_offline"),
    _script("pytorch_memlab", "pytorch_memlab==0.3.2", script="memlab_reporter"),
    Program("TraceML", ("traceml-ai==0.5.0",), ("traceml", "run", "train.py")),
    _script("Stormlog", "stormlog==0.4.3", script="stormlog_tracker"),
    _script("nvitop", "nvitop==1.7.2", script="nvitop_collector"),
    _script("codecarbon", "codecarbon==3.3.2", script="codecarbon_tracker"),
    _script("torch.profiler", script="profiler_trace"),
    _script("own memory history", script="memory_history"),
    _script(
        "those five together",
        "stormlog==0.4.3",
        "pytorch_memlab==0.3.2",
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
