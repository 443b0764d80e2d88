"""A script for test_vllm.py: one engine of vLLM in a process of its own, in all its states.

It prints a line of JSON for each state, with what the exporter says of it and what the driver does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ADDRESS, MODEL, OUT = sys.argv[1:4]
NEIGHBOR = """
import sys, time, torch
held = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda")
print("there", flush=True)
sys.stdin.read()
"""


def scrape() -> str:
    """Return the exporter's page."""
    return str(urlopen(f"http://{ADDRESS}/metrics").read().decode())


def published_at() -> list[float]:
    """Return when each process has written its newest sample, in Unix seconds."""
    found = re.findall(r"^torchmem_sample_timestamp_seconds{.*} (\S+)$", scrape(), re.MULTILINE)
    return [float(each) for each in found]


def note(state: str, seconds: float = 3.0) -> None:
    """Record a state that has lasted for some seconds, and that all processes have published.

    A process that does nothing publishes every 15 seconds, on a busy machine later.
    """
    begun, deadline = time.time(), time.monotonic() + 60
    time.sleep(seconds)
    while min(published_at(), default=begun) < begun and time.monotonic() < deadline:
        time.sleep(0.5)
    with Path(OUT).open("a") as lines:
        lines.write(json.dumps({"state": state, "text": scrape()}) + "\n")
    print(f"=== {state}", flush=True)


class Neighbor:
    """A process that holds memory of the GPU."""

    def __init__(self, mebibytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", NEIGHBOR, str(mebibytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TORCHMEM": "0"},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"there\n"

    def leave(self) -> None:
        """End the process."""
        self._process.communicate()


def prompts(count: int) -> list[Any]:
    """Return prompts of 32 tokens."""
    return [{"prompt_token_ids": list(range(1, 33))} for _ in range(count)]


def need_more_than_planned() -> None:
    """Serve requests for log probabilities of prompts, which no profile run makes."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        MODEL,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        hf_overrides={"vocab_size": 256_000},
    )
    plain = SamplingParams(max_tokens=900, detokenize=False, ignore_eos=True)
    engine.generate(prompts(16), plain, use_tqdm=False)
    note("within the plan")
    settings = SamplingParams(max_tokens=200, detokenize=False, ignore_eos=True, prompt_logprobs=5)
    long: list[Any] = [{"prompt_token_ids": list(range(1, 801))}]
    engine.generate(long, settings, use_tqdm=False)
    note("beyond the plan")


def main() -> None:
    """Go through all states."""
    if "logprobs" in sys.argv:
        need_more_than_planned()
        return
    from vllm import LLM, SamplingParams

    lora = {"enable_lora": True, "max_lora_rank": 64, "max_loras": 4} if "lora" in sys.argv else {}
    engine = LLM(
        MODEL,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager="graphs" not in sys.argv,
        enable_sleep_mode=True,
        max_model_len=1024,
        max_num_seqs=16,
        gpu_memory_utilization=0.92,
        worker_extension_cls="phantom_vllm.Leaking",
        **lora,
    )
    note("started")
    short = SamplingParams(max_tokens=32, detokenize=False, ignore_eos=True)
    assert len(engine.generate(prompts(20), short, use_tqdm=False)) == 20
    note("served")
    neighbor = Neighbor(4500)
    note("beside a neighbor")
    neighbor.leave()
    long = SamplingParams(max_tokens=900, detokenize=False, ignore_eos=True)
    engine.generate(prompts(32), long, use_tqdm=False)
    note("served long")
    for level in (1, 2):
        engine.sleep(level)
        note(f"asleep {level}")
        engine.wake_up()
        note(f"awake {level}")
    for _ in range(7):
        engine.collective_rpc("leak", args=(64,))
        engine.sleep(1)
        note("leaking", 0.5)
        engine.wake_up()
    note("leaked")
    engine.sleep(2)
    engine.wake_up(tags=["weights"])
    note("weights awake")
    engine.wake_up(tags=["kv_cache"])
    engine.sleep(1)
    neighbor = Neighbor(60_000)
    note("asleep beside a neighbor")
    with suppress(Exception):
        engine.wake_up()
        print("woke up all the same", flush=True)
    note("after a failed wake-up")
    neighbor.leave()


if __name__ == "__main__":
    main()
