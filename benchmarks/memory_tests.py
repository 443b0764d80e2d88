"""Seed regressions in training code of model packages, and see whether memory tests name them.

For each package, a training function is tested on the phantom GPU against a baseline of itself:
unchanged except for lines that need no memory, and with each of four regressions, all several
times, while other processes keep the cores busy. A regression counts as found if the test fails
and one of the first lines of what changed is where memory is now allocated. The peak is compared
with `torch.cuda.max_memory_allocated()` in every run.

    pip install 'torch===2.13.0' transformers timm x-transformers pytest
    python -m benchmarks.memory_tests
    python -m benchmarks.memory_tests --packages transformers --runs 3
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BUSY = "while True: pass"
PLUGIN = "torchmem.pytest_plugin.plugin"
TRAINING = """
import torch
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, BATCH = 256, 128, 4


{model}

class Training(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = build()
        self.register_buffer("table", torch.zeros(1024, 1024))

    def forward(self, inputs):
        return checkpoint(self.run_model, inputs, use_reentrant=False)

    def run_model(self, inputs):
        return self.model(inputs)


def train(steps=3):
    model = Training().cuda().train().to(torch.bfloat16)
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
import pytest
import torch
from training import train

@pytest.mark.gpu_memory
@pytest.mark.parametrize("run", range({runs}))
def test_training(run, gpu_memory):
    with gpu_memory() as used:
        train()
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


LOST_CHECKPOINT = (
    "return checkpoint(self.run_model, inputs, use_reentrant=False)",
    "return self.run_model(inputs)",
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

    def base(self, source: str) -> str:
        """Return the source that is changed."""
        return source if self.is_checkpointed else source.replace(*LOST_CHECKPOINT)

    def apply(self, source: str) -> str:
        """Return the changed source."""
        assert source.count(self.old) == 1, (self.name, source.count(self.old))
        return source.replace(self.old, self.new)

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


MODEL_LINE = r"\w+/[\w/]+\.py:\d+|training.py:{line:return self.model(inputs)}\b"
SEEDS = (
    Seed(
        "no effect",
        "WIDTH, LENGTH, BATCH",
        '"""Train."""\n\n# The size of the model.\nWIDTH, LENGTH, BATCH',
        None,
    ),
    Seed(
        "kept graph",
        "        loss.backward()\n",
        "        loss.backward(retain_graph=True)\n        kept.append(loss)\n",
        MODEL_LINE + r"|training.py:{line:output = model(inputs())}\b",
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
    """The runs of one seed: how many failed, how many of these named the line, and the growth."""

    runs: int
    failed: int
    named: int
    seconds: float
    sentence: str


def pytest_run(folder: Path, *arguments: str) -> tuple[str, float]:
    """Run the tests of a folder; return the output, and the seconds that it took."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "--gpu-memory", "-rA"]
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:torchmem -p no:cacheprovider\n")
    done = subprocess.run(
        [*command, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr, time.monotonic() - started


def write(folder: Path, source: str, runs: int) -> None:
    """Write the training code and its test."""
    (folder / "training.py").write_text(source)
    (folder / "test_training.py").write_text(TEST.format(runs=runs))


def same_for_all(path: Path, runs: int) -> None:
    """Give each run of the test the entry of the first one."""
    values = json.loads(path.read_text())
    (entry,) = values["entries"].values()
    names = (f"test_training.py::test_training[{number}]" for number in range(runs))
    path.write_text(json.dumps({**values, "entries": dict.fromkeys(names, entry)}))


def measure(folder: Path, source: str, seed: Seed, runs: int) -> Row:
    """Test one seed several times."""
    changed = seed.apply(source)
    if seed.name.startswith("fp32"):
        changed = changed.replace("dtype=torch.bfloat16, ", "")
    write(folder, changed, runs)
    output, seconds = pytest_run(folder, "--gpu-memory-baseline", "gpu-memory.json")
    (failures,) = re.findall(r"(\d+) failed", output[-300:]) or ["0"]
    assert re.search(r"\d+ (passed|failed)", output[-300:]), output[-5000:]
    texts = re.split(r"\n_{5,} test_training\[\d+\] _{5,}\n", output)[1:]
    named = sum(seed.found_in(text, changed) for text in texts) if seed.place else 0
    sentence = next((text.splitlines()[0] for text in texts), "")
    return Row(runs, int(failures), named, seconds, sentence)


def measure_package(package: str, runs: int, seeds: Sequence[Seed]) -> Iterator[tuple[Seed, Row]]:
    """Save a baseline for a package, and yield the row of each seed."""
    source = TRAINING.format(model=MODELS[package].strip() + "\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for is_checkpointed in (True, False):
            chosen = [seed for seed in seeds if seed.is_checkpointed == is_checkpointed]
            if chosen:
                base = chosen[0].base(source)
                write(folder, base, 1)
                output, _ = pytest_run(folder, "--gpu-memory-save-baseline", "gpu-memory.json")
                assert (folder / "gpu-memory.json").exists(), output
                same_for_all(folder / "gpu-memory.json", runs)
                for seed in chosen:
                    yield seed, measure(folder, base, seed, runs)
                (folder / "gpu-memory.json").unlink()


def line(cells: Mapping[str, object] | Sequence[object]) -> str:
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
    print(line(["package", "seed", "runs", "failed", "named", "seconds", "first failure"]))
    print(line(["---"] * 7))
    with busy(arguments.busy):
        for package in arguments.packages:
            for seed, row in measure_package(package, arguments.runs, seeds):
                seconds = f"{row.seconds:.0f}"
                counts = [row.runs, row.failed, row.named, seconds, row.sentence]
                print(line([package, seed.name, *counts]), flush=True)


if __name__ == "__main__":
    main()
