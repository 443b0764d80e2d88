"""The snippets of docs/frameworks.md in each framework's own loop, on PyTorch's real allocator."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.phantom import run_on_phantom

pytestmark = pytest.mark.allocator

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
PHANTOM = ("-m", "torchmem.phantom", "--memory", "4GiB", "--gpus", "2")
ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}

TRANSFORMERS = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Texts(torch.utils.data.Dataset):
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __getitem__(self, index):
        tokens = torch.randint(100, (16,))
        return {"input_ids": tokens, "labels": tokens}

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
))
texts, held_out = Texts(18), Texts(6)
quiet = dict(save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no")
arguments = TrainingArguments(
    "unused", run_name="tiny", num_train_epochs=2, per_device_train_batch_size=4,
    gradient_accumulation_steps=2, eval_strategy="epoch", **quiet,
)
"""
LIGHTNING = """
import sys, torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def training_step(self, batch, index): return self.layer(batch[0]).sum()
    def validation_step(self, batch, index): return self.layer(batch[0]).sum()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)

folder, module = "logs", Module()
train_loader = DataLoader(TensorDataset(torch.randn(18, 8)), batch_size=4)
validation_loader = DataLoader(TensorDataset(torch.randn(6, 8)), batch_size=4)
"""
LOADERS = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(8, 8)
train_loader = DataLoader(TensorDataset(torch.randn(18, 8)), batch_size=4)
validation_loader = DataLoader(TensorDataset(torch.randn(6, 8)), batch_size=4)
"""
FASTAI = """
import pickle, torch
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
model, loss = torch.nn.Linear(8, 8), torch.nn.MSELoss()
pairs = [(torch.randn(8), torch.randn(8)) for _ in range(24)]
loaders = DataLoaders.from_dsets(pairs[:18], pairs[18:], bs=4, device="cuda", num_workers=0)
"""
ACCELERATE = (
    LOADERS
    + """
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

class Tracker(GeneralTracker):
    name, requires_logging_directory, tracker, run_name = "own", False, None, "tiny"
    def store_init_configuration(self, values): pass
    def log(self, values, step=None, **_): pass

accelerator = Accelerator(gradient_accumulation_steps=2, log_with=[Tracker()])
accelerator.init_trackers("tiny")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, train_loader, validation_loader = accelerator.prepare(
    model, optimizer, train_loader, validation_loader
)
"""
)
DEEPSPEED = (
    LOADERS
    + """
import deepspeed
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
first, *others = model.parameters()
groups = [{"params": [first]}, {"params": others, "weight_decay": 0.0}]
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(groups, lr=0.1), config={
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
)
"""
)
RAY = """
import os, ray, torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(12, 8))
"""
RAY_RUN = """
ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
TorchTrainer(
    train_function, scaling_config=ScalingConfig(num_workers=2, use_gpu=True),
    run_config=RunConfig(name="tiny", storage_path=os.getcwd()),
).fit()
ray.shutdown()
"""
PLAIN = LOADERS + "model = model.cuda(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"


def snippet(heading: str) -> str:
    """Return the first Python block below a heading of the page."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.split(r"```(?:python\n)?", section)[1]


def job(
    folder: Path, program: str, *before: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program on one phantom GPU of two, after the words `before`."""
    script = folder / "script.py"
    script.write_text(program)
    settings = {
        "TORCHMEM_RUN_DIR": str(folder / "run"),
        "TORCHMEM_INTERVAL": "0.001",
        "PHANTOM_STATE_DIR": str(folder / "phantom"),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
    }
    settings |= ONE_GPU if environment is None else environment
    if not before:
        return run_on_phantom(script, memory="4GiB", devices=2, environment=settings, folder=folder)
    return subprocess.run(
        [sys.executable, *PHANTOM, "--", *before, sys.executable, str(script)],
        cwd=folder,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def samples(folder: Path, done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return what the processes of a job that succeeded have published, by rank."""
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(path.read_text()) for path in (folder / "run").glob("*/*.sample.json")]
    return sorted(found, key=lambda sample: int(sample["process"]["rank"]))


def phases(sample: dict[str, Any]) -> set[str]:
    """Return the phases whose peak is known, of which each is at least what the model takes."""
    peaks = sample["devices"][0]["phase_peaks"]
    assert all(peak > 0 for peak in peaks.values())
    return set(peaks)


def summary(sample: dict[str, Any]) -> tuple[int, int, str, set[str]]:
    """Return steps, samples, the name of the run, and the phases, without any error of the SDK."""
    assert sample["cost"]["errors"] == {}
    steps = sample["steps"]
    return steps["count"], steps["samples"], sample["process"]["run"], phases(sample)


def requires(*packages: str) -> None:
    """Skip the test where a package is missing."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed; docs/frameworks.md names the versions")


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    """Two epochs of five batches make six steps and 36 samples; evaluation and generation show."""
    requires("transformers", "accelerate")
    generate = """
model.generate(torch.ones(1, 4, dtype=torch.long, device="cuda"), max_new_tokens=3)
assert 6 == trainer.state.global_step
"""
    program = TRANSFORMERS + snippet("Hugging Face Transformers and TRL") + generate
    [sample] = samples(tmp_path, job(tmp_path, program))

    assert summary(sample) == (6, 36, "tiny", {"train", "evaluate", "generate"})


def test_a_trainer_under_torchmem_run(tmp_path: Path) -> None:
    """The callback goes on with the session that `torchmem run` began, and names its run."""
    requires("transformers", "accelerate")
    program = TRANSFORMERS + "model.cuda()\n" + snippet("Hugging Face Transformers and TRL")
    words = (sys.executable, "-m", "torchmem.cli", "run", "--")
    [sample] = samples(tmp_path, job(tmp_path, program, *words))

    assert summary(sample) == (6, 36, "tiny", {"train", "evaluate"})


def test_an_error_of_the_callback_and_one_of_the_training(tmp_path: Path) -> None:
    """An error in the callback is counted and training goes on; the training's own error passes."""
    requires("transformers", "accelerate")
    broken = """
class Broken:
    def __getattr__(self, name): raise RuntimeError("broken")
found = trainer.callback_handler.callbacks
[callback] = [one for one in found if isinstance(one, TorchmemCallback)]
for event in (callback.on_step_end, callback.on_init_end):
    event(Broken(), Broken(), Broken())
def fail(*_, **__): raise ValueError("mine")
trainer.training_step = fail
trainer.train()
"""
    program = TRANSFORMERS + snippet("Hugging Face Transformers and TRL") + broken
    done = job(tmp_path, program)
    [path] = (tmp_path / "run").glob("*/*.sample.json")
    sample = json.loads(path.read_text())

    assert "\nValueError: mine\n" in done.stderr, done.stderr[-2000:]
    assert (sample["steps"]["count"], sample["ended"]) == (6, "failed")
    assert sample["cost"]["errors"]["step"] == 2


SFT = """
import json
from pathlib import Path
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig, SFTTrainer as Trainer

words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
)
texts = Dataset.from_dict({"text": ["a b a b"] * 10})
held_out = Dataset.from_dict({"text": ["b a"] * 4})
arguments = SFTConfig(
    "unused", run_name="tiny", num_train_epochs=1, per_device_train_batch_size=2, max_length=16,
    gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1, **quiet,
)
"""


def test_the_sft_trainer_of_trl(tmp_path: Path) -> None:
    """The same callback in TRL: ten samples in five batches are three steps."""
    requires("trl", "transformers", "accelerate", "datasets")
    code = snippet("Hugging Face Transformers and TRL")
    code = code.replace("    model=model,", "    model=model, processing_class=tokenizer,")
    [sample] = samples(tmp_path, job(tmp_path, TRANSFORMERS + SFT + code))

    assert summary(sample) == (3, 10, "tiny", {"train", "evaluate"})


def test_lightning(tmp_path: Path) -> None:
    """Five batches of which two make a step: three steps, 18 samples, and a validation."""
    requires("lightning")
    done = job(tmp_path, LIGHTNING + snippet("Lightning") + "assert 3 == trainer.global_step\n")
    [sample] = samples(tmp_path, done)

    assert summary(sample) == (3, 18, "tiny", {"train", "evaluate"})


def test_fastai(tmp_path: Path) -> None:
    """Two epochs of four batches, of which two make a step of fastai's own optimizer."""
    requires("fastai")
    exported = "copy = pickle.loads(pickle.dumps(learner.cbs))\n"
    [sample] = samples(tmp_path, job(tmp_path, FASTAI + snippet("fastai") + exported))

    assert summary(sample) == (4, 32, "tiny", {"train", "evaluate"})


def test_accelerate(tmp_path: Path) -> None:
    """Accumulated batches make one step, also the single one at the end of the loader."""
    requires("accelerate")
    [sample] = samples(tmp_path, job(tmp_path, ACCELERATE + snippet("Accelerate")))

    assert summary(sample) == (3, 18, "tiny", {"train", "evaluate"})


def test_deepspeed(tmp_path: Path) -> None:
    """Steps are the engine's, although ZeRO steps each of the two groups of parameters."""
    requires("deepspeed")
    program = DEEPSPEED + snippet("DeepSpeed") + "assert 2 == engine.global_steps\n"
    [sample] = samples(tmp_path, job(tmp_path, program))

    assert summary(sample) == (2, 18, "tiny", {"train"})


def test_ray_train(tmp_path: Path) -> None:
    """Both workers count their own samples under the name of the run, and end as `exited`."""
    requires("ray")
    program = RAY + snippet("Ray Train") + RAY_RUN
    found = samples(tmp_path, job(tmp_path, program, environment={}))

    assert [summary(sample) for sample in found] == [(3, 6, "tiny", {"train"})] * 2
    assert [sample["ended"] for sample in found] == ["exited"] * 2


def test_any_other_loop(tmp_path: Path) -> None:
    """A plain loop shows its steps, samples and phases by `session.batches`."""
    [sample] = samples(tmp_path, job(tmp_path, PLAIN + snippet("Any other loop")))

    assert summary(sample) == (5, 18, "tiny", {"train", "evaluate", "generate"})


def test_any_other_server(tmp_path: Path) -> None:
    """Each request is a step and a sample, and afterwards the process waits."""
    program = PLAIN + "requests = [torch.ones(1, 8)] * 4\n" + snippet("Any other server")
    [sample] = samples(tmp_path, job(tmp_path, program))

    assert summary(sample) == (4, 4, "tiny", {"generate"})
    assert sample["stall_after_seconds"] is None
