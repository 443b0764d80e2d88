"""Seed regressions in training code of model packages, and see whether memory tests name them.

For each package, a training function is tested on the phantom GPU against a baseline of itself:
unchanged except for lines that need no memory, and with each of four regressions, all several
times, while other processes keep the cores busy. A regression counts as found if the test fails
and one of the first lines of what changed is where memory is now allocated. The peak is compared
with `torch.cuda.max_memory_allocated()` in every run.

    pip install 'torch===2.13.0' transformers timm x-transformers pytest
    python -m experiments.memory_tests
    python -m experiments.memory_tests --packages transformers --runs 3
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BUSY = "while True: pass"
PLUGIN = "torchmem.pytest_plugin.plugin"
TRAINING = """
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

BLOCKS = ("LlamaDecoderLayer", "Block", "Attention", "FeedForward")
WIDTH, LENGTH, BATCH = 256, 256, 8


def is_block(module):
    return type(module).__name__ in BLOCKS


{model}

class Training(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = build()
        self.register_buffer("table", torch.zeros(1024, 1024))

    def forward(self, inputs):
        return self.model(inputs)


def train(steps=3):
    model = Training().cuda().train().to(torch.bfloat16)
    apply_activation_checkpointing(model, check_fn=is_block)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    for step in range(steps):
        output = model(inputs())
        loss = output.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TEST = """
import linecache
import os
from pathlib import Path

import pytest

if "libphantom" in os.environ.get("LD_PRELOAD", ""):  # once, for all forks
    import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
    {first_import}


@pytest.mark.gpu_memory
@pytest.mark.parametrize("run", range({runs}))
@pytest.mark.parametrize("variant", {variants})
def test_training(variant, run, gpu_memory):
    import torch

    path = str(Path(__file__).with_name("training.py"))
    source = Path(__file__).with_name(variant + ".txt").read_text()
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    scope = {{"__name__": "training"}}
    exec(compile(source, path, "exec"), scope)
    with gpu_memory() as used:
        scope["train"]()
    assert used.peak == torch.cuda.max_memory_allocated()
"""
MODELS = {
    "transformers": """
from transformers import LlamaConfig, LlamaModel


def build():
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=1024, max_position_embeddings=LENGTH, use_cache=False,
    )
    return Hidden(LlamaModel(config))


class Hidden(torch.nn.Module):
    def __init__(self, llama):
        super().__init__()
        self.llama = llama

    def forward(self, tokens):
        return self.llama(input_ids=tokens).last_hidden_state


def inputs():
    return torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cuda")
""",
    "timm": """
import timm


def build():
    return timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=100)


def inputs():
    return torch.zeros(BATCH, 3, 224, 224, dtype=torch.bfloat16, device="cuda")
""",
    "x_transformers": """
from x_transformers import Decoder, TransformerWrapper


def build():
    layers = Decoder(dim=WIDTH, depth=4, heads=4)
    return TransformerWrapper(num_tokens=1024, max_seq_len=LENGTH, attn_layers=layers)


def inputs():
    return torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cuda")
""",
}


INPUTS = ("dtype=torch.bfloat16, ", "")
LOST_CHECKPOINT = (
    "    apply_activation_checkpointing(model, check_fn=is_block)\n",
    "",
)


@dataclass(frozen=True, slots=True)
class Seed:
    """A change of the training code: what is replaced, and in which lines it shows.

    place: a pattern of the lines of what changed, None if the change has no effect. {line:TEXT}
    stands for the number of the line with TEXT.
    """

    name: str
    old: str
    new: str
    place: str | None
    component: str = ""
    is_checkpointed: bool = True

    @property
    def file_name(self) -> str:
        """The name in a test's id."""
        return self.name.replace(" ", "_")

    @property
    def base_name(self) -> str:
        """The name of the source that is changed, in a test's id."""
        return "checkpointed" if self.is_checkpointed else "whole"

    def base(self, source: str) -> str:
        """Return the source that is changed."""
        return source if self.is_checkpointed else source.replace(*LOST_CHECKPOINT)

    def apply(self, source: str) -> str:
        """Return the changed source."""
        assert source.count(self.old) == 1, (self.name, source.count(self.old))
        changed = source.replace(self.old, self.new)
        return changed.replace(*INPUTS) if self.component == "parameters" else changed

    def found_in(self, text: str, source: str) -> bool:
        """Return whether a failure names the place."""
        changed = text.partition("What changed")[2].partition("What held")[0]
        assert self.place is not None
        pattern = re.sub(r"\{line:(.*?)\}", lambda each: str(_line(source, each[1])), self.place)
        return any(
            re.search(pattern, line) is not None and self.component in line
            for line in changed.splitlines()
        )


def _line(source: str, text: str) -> int:
    (number,) = (index for index, line in enumerate(source.splitlines(), 1) if text in line)
    return number


MODEL_LINE = r" (?!training\.py)\S+\.py:\d+"
"""A line of the package's code."""
SEEDS = (
    Seed(
        "no effect",
        "WIDTH, LENGTH, BATCH = ",
        '"""Train."""\n\n# The size of the model.\nWIDTH, LENGTH, BATCH = ',
        None,
    ),
    Seed(
        "kept graph",
        "        loss.backward()\n",
        "        loss.backward(retain_graph=True)\n        kept.append(loss)\n",
        MODEL_LINE,
        "held",
        is_checkpointed=False,
    ),
    Seed(
        "lost checkpoint",
        *LOST_CHECKPOINT,
        MODEL_LINE,
        "activations",
    ),
    Seed(
        "larger buffer",
        "torch.zeros(1024, 1024)",
        "torch.zeros(4096, 4096)",
        r"training.py:{line:model = Training().cuda()}\b",
        "buffers",
    ),
    Seed(
        "fp32 instead of bf16",
        "model = Training().cuda().train().to(torch.bfloat16)",
        "model = Training().cuda().train()",
        r"training.py:{line:model = Training().cuda()}\b",
        "parameters",
    ),
)


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep cores busy with endless loops."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True)
class Row:
    """The runs of one seed: how many failed, how many of these named the line, and the first."""

    runs: int
    failed: int
    named: int
    sentence: str


def pytest_run(folder: Path, *arguments: str) -> str:
    """Run the tests of a folder; return the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "--gpu-memory"]
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:torchmem -p no:cacheprovider\n")
    done = subprocess.run(
        [*command, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def save_baselines(folder: Path, seeds: Sequence[Seed], runs: int) -> None:
    """Save what the unchanged code needs as the baseline of each seed's tests."""
    path = folder / "gpu-memory.json"
    bases = sorted({seed.base_name for seed in seeds})
    ids = [f"test_training.py::test_training[{base}-0]" for base in bases]
    output = pytest_run(folder, "--gpu-memory-save-baseline", path.name, *ids)
    assert path.exists(), output
    values = json.loads(path.read_text())
    entries = dict(zip(bases, (values["entries"][each] for each in ids), strict=True))
    tests = {
        f"test_training.py::test_training[{seed.file_name}-{number}]": entries[seed.base_name]
        for seed in seeds
        for number in range(runs)
    }
    path.write_text(json.dumps({**values, "entries": tests}))


def measure_package(package: str, runs: int, seeds: Sequence[Seed]) -> Iterator[tuple[Seed, Row]]:
    """Save a baseline for a package, and yield the row of each seed."""
    source = TRAINING.format(model=MODELS[package].strip() + "\n")
    sources = {seed.file_name: seed.apply(seed.base(source)) for seed in seeds}
    bases = {seed.base_name: seed.base(source) for seed in seeds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for variant, text in {**bases, **sources}.items():
            (folder / f"{variant}.txt").write_text(text)
        variants = [*bases, *sources]
        first_import = MODELS[package].strip().splitlines()[0]
        test = TEST.format(first_import=first_import, runs=runs, variants=variants)
        (folder / "test_training.py").write_text(test)
        save_baselines(folder, seeds, runs)
        chosen = ("--deselect", *(f"test_training.py::test_training[{each}" for each in bases))
        deselected = [word for each in chosen[1:] for word in (chosen[0], each)]
        output = pytest_run(folder, "--gpu-memory-baseline", "gpu-memory.json", *deselected)
    assert re.search(r"\d+ (passed|failed)", output[-300:]), output[-5000:]
    for seed in seeds:
        yield seed, row(seed, sources[seed.file_name], output, runs)


def row(seed: Seed, source: str, output: str, runs: int) -> Row:
    """Return what became of the runs of a seed."""
    parts = re.split(r"\n_{3,} test_training\[(.+)-\d+\] _{3,}\n", output)
    texts = [
        text for name, text in zip(parts[1::2], parts[2::2], strict=True) if name == seed.file_name
    ]
    named = sum(seed.found_in(text, source) for text in texts) if seed.place else 0
    return Row(runs, len(texts), named, texts[0].splitlines()[0] if texts else "")


def line(cells: Sequence[object]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print a table with a row for each package and seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", nargs="+", default=[seed.name for seed in SEEDS])
    parser.add_argument("--runs", type=int, default=20, help="of each (default: %(default)s)")
    parser.add_argument(
        "--busy", type=int, default=os.cpu_count(), help="endless loops (default: one per core)"
    )
    arguments = parser.parse_args()
    seeds = [seed for seed in SEEDS if seed.name in arguments.seeds]
    print(line(["package", "seed", "runs", "failed", "named", "first failure"]))
    print(line(["---"] * 6))
    with busy(arguments.busy):
        for package in arguments.packages:
            for seed, found in measure_package(package, arguments.runs, seeds):
                counts = [found.runs, found.failed, found.named, found.sentence]
                print(line([package, seed.name, *counts]), flush=True)


if __name__ == "__main__":
    main()
