"""A script for test_two_processes.py: vLLM's engine, and a trainer in another process.

It prints a line of JSON for each state, with what the exporter says of it and what both answered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

ADDRESS, MODEL, OUT = sys.argv[1:4]
RUN_DIR = Path(os.environ["TORCHMEM_RUN_DIR"])
TRAINER = Path(__file__).with_name("rl_trainer.py")
MIB = 1 << 20
GIB = 1024


def page() -> str:
    """Return the exporter's page."""
    return str(urlopen(f"http://{ADDRESS}/metrics").read().decode())


def mib(name: str, **labels: str) -> int:
    """Return the sum of the series of a metric, in MiB."""
    samples = (s for f in text_string_to_metric_families(page()) for s in f.samples)
    found = (s for s in samples if s.name == name and labels.items() <= s.labels.items())
    return int(sum(each.value for each in found)) // MIB


def note(state: str, **said: Any) -> None:
    """Record a state that has lasted for some seconds, and what was said."""
    time.sleep(3)
    with Path(OUT).open("a") as lines:
        line = {"state": state, "text": page(), "own": json.dumps(said)}
        lines.write(json.dumps(line) + "\n")
    print(f"=== {state}: {said}", flush=True)


class Trainer:
    """The other process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(TRAINER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.result() == "ready"

    def order(self, text: str) -> None:
        """Send a line, and return when the trainer has read it."""
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()
        assert self.result() is None

    def result(self) -> Any:
        """Return the next result."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def does(self, text: str) -> Any:
        """Send a line and return its result."""
        self.order(text)
        return self.result()

    def stops(self) -> Any:
        """End what goes on until a line comes, and return its result."""
        assert self._process.stdin is not None
        self._process.stdin.write("step 1\n")
        self._process.stdin.flush()
        ended = self.result()
        assert [self.result(), self.result()] == [None, True]
        return ended

    def leave(self) -> None:
        """End the process."""
        self._process.communicate()


def engines_answer() -> str:
    """Return what the engine said to the trainer's request, from the file of its answer."""
    (file,) = RUN_DIR.glob("*/[!.]*.release-answer.json")
    return str(json.loads(file.read_bytes())["note"])


def release(run: str) -> str:
    """Return what `torchmem release` prints."""
    command = [sys.executable, "-m", "torchmem.cli", "release", "--run", run]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def main() -> None:
    """Go through a round of reinforcement learning, and what may go wrong in it."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        MODEL,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_sleep_mode=True,
        max_model_len=1024,
        max_num_seqs=16,
        gpu_memory_utilization=0.6,
    )
    prompts: list[Any] = [{"prompt_token_ids": list(range(1, 33))}]
    settings = SamplingParams(max_tokens=8, detokenize=False, ignore_eos=True)
    engine.generate(prompts, settings, use_tqdm=False)
    trainer = Trainer()
    waited = trainer.does(f"wait {60 * GIB} 4")
    note("awake", waited=waited, answer=engines_answer(), release=release("model"))

    engine.sleep(1)
    time.sleep(1)
    free = mib("nvml_memory_free_bytes")
    beyond = free - mib("torchmem_engine_memory_bytes", state="asleep")
    note(
        "asleep",
        takes_too_much=trainer.does(f"wait {beyond + GIB} 2"),
        takes_what_is_left=trainer.does(f"wait {beyond - GIB} 2"),
        borrows=trainer.does(f"wait {free - GIB} 2 borrow"),
    )

    trainer.does(f"keep {beyond + 10 * GIB}")
    note("the trainer has borrowed")
    trainer.order("train")
    engine.wake_up()
    engine.generate(prompts, settings, use_tqdm=False)
    note("woken beside a training", trainer=trainer.stops())

    engine.sleep(1)
    trainer.does(f"step {beyond + 10 * GIB}")
    note("the trainer has cached")
    trainer.order("idle")
    engine.wake_up()
    engine.generate(prompts, settings, use_tqdm=False)
    note("woken beside an idle trainer", trainer=trainer.stops())
    trainer.leave()


if __name__ == "__main__":
    main()
