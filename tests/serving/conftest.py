"""Engines on a phantom GPU, each with an exporter that watches it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from support.stack import free_port

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
PHANTOM = (sys.executable, "-m", "torchmem.phantom", "--")
MINUTES = 60
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class State:
    """What the exporter said in one state of an engine, and what the engine's `own` page did."""

    text: str
    own: str = ""

    def all(self, name: str, **labels: str) -> list[float]:
        """Return the values of the series of a metric with these labels."""
        samples = (s for f in text_string_to_metric_families(self.text) for s in f.samples)
        return [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]

    def mib(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series of a metric, in MiB; None without any."""
        values = self.all(name, **labels)
        return sum(values) / MIB if values else None

    def parts(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the values of a metric by one of its labels, in MiB."""
        samples = (s for f in text_string_to_metric_families(self.text) for s in f.samples)
        return {
            s.labels[label]: s.value / MIB
            for s in samples
            if s.name == name and labels.items() <= s.labels.items()
        }


@dataclass(frozen=True)
class Run:
    """What one engine went through, and its log."""

    states: dict[str, State]
    log: str


def run_engine(script: str, folder: Path, *arguments: str, **environment: str) -> Run:
    """Run a script of this folder on a phantom GPU of 80 GB, with torchmem in all its processes."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    variables = os.environ | {
        "PYTHONPATH": str(HERE / "shims"),
        "PHANTOM_STATE_DIR": str(folder / "gpus"),
        "TORCHMEM": "1",
        "TORCHMEM_RUN_DIR": str(folder / "run"),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles a kernel
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    out, address = folder / "states", f"127.0.0.1:{free_port()}"
    command = (*PHANTOM, sys.executable, "-W", "ignore", str(HERE / script))
    with _exporter(address, variables):
        done = subprocess.run(
            [*command, address, str(folder / "model"), str(out), *arguments],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=20 * MINUTES,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-6000:]
    noted: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    states = {each["state"]: State(each["text"], each.get("own", "")) for each in noted}
    return Run(states, done.stdout)


@contextmanager
def _exporter(address: str, variables: dict[str, str]) -> Iterator[None]:
    command = [*PHANTOM, sys.executable, "-m", "torchmem.cli", "exporter", "--listen", address]
    process = subprocess.Popen(command, env=variables | {"TORCHMEM": "0"})
    try:
        yield
    finally:
        process.terminate()
        process.wait()
