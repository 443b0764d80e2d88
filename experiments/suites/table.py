"""The test suites that are run: their releases, what they need, and which of their tests."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.programs.table import TORCH

PYTEST = ("pytest<9", "pytest-timeout")


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests of a project, of one release.

    Attributes:
        name: as it is listed, and how `--only` finds it.
        repository: owner and name on GitHub.
        tag: of the release.
        packages: what is installed for it, beside PyTorch and pytest; the first is the project.
        tests: paths in its checkout, which take a minute or two of CPU time.
        gpus: phantom GPUs that it sees; with none, it runs without the phantom driver.
        arguments: of pytest.
    """

    name: str
    repository: str
    tag: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    gpus: int = 1
    arguments: tuple[str, ...] = ()

    @property
    def requirements(self) -> tuple[str, ...]:
        """Everything that its environment has beside torchmem."""
        return (TORCH, "numpy", *self.packages, *PYTEST)


# Launchers, hooks, memory, training, processes.
SUITES = (
    Suite(
        "accelerate",
        "huggingface/accelerate",
        "v1.14.0",
        ("accelerate==1.14.0", "parameterized", "transformers==5.23.0"),
        (
            "tests/test_accelerator.py",
            "tests/test_hooks.py",
            "tests/test_imports.py",
            "tests/test_memory_utils.py",
            "tests/test_optimizer.py",
            "tests/test_scheduler.py",
        ),
    ),
    Suite(
        "PEFT",
        "huggingface/peft",
        "v0.20.0",
        ("peft==0.20.0", "parameterized", "transformers==5.23.0", "datasets", "scikit-learn"),
        (
            "tests/test_bufferdict.py",
            "tests/test_incremental_pca.py",
        ),
    ),
    Suite(
        "Opacus",
        "meta-pytorch/opacus",
        "v1.6.0",
        ("opacus==1.6.0", "hypothesis", "torchvision"),
        (
            "opacus/tests/batch_memory_manager_test.py",
            "opacus/tests/dpdataloader_test.py",
            "opacus/tests/grad_sample_module_test.py",
            "opacus/tests/gradient_accumulation_test.py",
            "opacus/tests/module_validator_test.py",
            "opacus/tests/poisson_test.py",
            "opacus/tests/schedulers",
        ),
        gpus=0,
    ),
    Suite(
        "skorch",
        "skorch-dev/skorch",
        "v1.4.0",
        ("skorch==1.4.0", "pandas", "flaky", "safetensors"),
        (
            "skorch/tests/test_net.py",
            "skorch/tests/test_classifier.py",
            "skorch/tests/test_history.py",
            "skorch/tests/test_dataset.py",
        ),
        gpus=0,
    ),
    Suite(
        "stable-baselines3",
        "DLR-RM/stable-baselines3",
        "v2.8.0",
        ("stable-baselines3[extra]==2.8.0",),
        (
            "tests/test_monitor.py",
            "tests/test_preprocessing.py",
            "tests/test_spaces.py",
            "tests/test_vec_check_nan.py",
            "tests/test_vec_monitor.py",
        ),
        gpus=0,
    ),
    Suite(
        "timm",
        "huggingface/pytorch-image-models",
        "v1.0.28",
        ("timm==1.0.28", "expecttest"),
        (
            "tests/test_layers.py",
            "tests/test_layers_pool.py",
            "tests/test_scheduler.py",
            "tests/test_utils.py",
        ),
        gpus=0,
    ),
    Suite(
        "torchmetrics",
        "Lightning-AI/torchmetrics",
        "v1.9.0",
        ("torchmetrics==1.9.0", "cachier", "cloudpickle", "psutil", "scikit-learn", "phmdoctest"),
        ("tests/unittests/bases", "tests/unittests/wrappers/test_running.py"),
        gpus=0,
        arguments=("-k", "not ddp and not Synclike"),
    ),
    Suite(
        "PyTorch Ignite",
        "pytorch/ignite",
        "v0.5.5",
        ("pytorch-ignite==0.5.5", "scipy", "scikit-learn"),
        (
            "tests/ignite/engine/test_create_supervised.py",
            "tests/ignite/engine/test_engine.py",
            "tests/ignite/engine/test_memory_leaks.py",
            "tests/ignite/distributed/test_auto.py",
            "tests/ignite/handlers/test_checkpoint.py",
        ),
    ),
    Suite(
        "pytorch_memlab",
        "Stonesjtu/pytorch_memlab",
        "0.3.0",
        ("pytorch_memlab==0.3.0",),
        ("test",),
    ),
    Suite(
        "joblib",
        "joblib/joblib",
        "1.5.3",
        ("joblib==1.5.3", "threadpoolctl"),
        (
            "joblib/test/test_memmapping.py",
            "joblib/test/test_module.py",
            "joblib/test/test_missing_multiprocessing.py",
            "joblib/test/test_cloudpickle_wrapper.py",
        ),
        gpus=0,
    ),
    Suite(
        "loky",
        "joblib/loky",
        "3.5.6",
        ("loky==3.5.6", "psutil"),
        (
            "tests/test_loky_backend.py",
            "tests/test_loky_module.py",
            "tests/test_resource_tracker.py",
        ),
        gpus=0,
    ),
)
