"""A script for test_sglang.py: SGLang's server, awake, asleep and awake again.

It prints a line of JSON for each state, with what the exporter and the server itself say of it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

ADDRESS, MODEL, OUT = sys.argv[1:4]
NAME = "tiny-llama"
START_SECONDS = 900


def cuda_home(folder: Path) -> Path:
    """Return a CUDA toolkit made of NVIDIA's packages, as SGLang compiles kernels."""
    toolkit, home = Path(sysconfig.get_path("purelib"), "nvidia", "cu13"), folder / "cuda"
    (home / "lib64").mkdir(parents=True, exist_ok=True)
    for each in toolkit.iterdir():
        (home / each.name).symlink_to(each)
    for each in (toolkit / "lib").iterdir():
        (home / "lib64" / each.name).symlink_to(each)
        if ".so." in each.name:
            plain = home / "lib64" / (each.name.partition(".so.")[0] + ".so")
            if not plain.is_symlink():
                plain.symlink_to(each)
    return home


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """SGLang's server, started by `torchmem run`."""

    def __init__(self) -> None:
        self._port = free_port()
        command = [sys.executable, "-m", "torchmem.cli", "run", "--name", NAME, "--"]
        command += [sys.executable, "-W", "ignore", "-m", "sglang.launch_server"]
        command += ["--model-path", MODEL, "--served-model-name", NAME, "--port", str(self._port)]
        command += ["--load-format", "dummy", "--skip-tokenizer-init", "--enable-metrics"]
        command += ["--enable-memory-saver", "--mem-fraction-static", "0.8", *sys.argv[4:]]
        home = cuda_home(Path(OUT).parent)
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "CUDA_HOME": str(home), "SGLANG_PLUGINS": "phantom_shims"},
        )

    def wait(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "the server has ended"
            try:
                urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5).read()
            except (URLError, OSError):
                time.sleep(1)
            else:
                return
        raise AssertionError("the server did not start")

    def post(self, path: str, **body: Any) -> str:
        """Send a request and return the answer."""
        request = Request(
            f"http://127.0.0.1:{self._port}/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return str(urlopen(request, timeout=300).read().decode())  # noqa: S310 - on loopback

    def metrics(self) -> str:
        """Return the server's own metrics."""
        return str(urlopen(f"http://127.0.0.1:{self._port}/metrics").read().decode())

    def end(self) -> None:
        """End the server and its workers."""
        self._process.terminate()
        self._process.wait(60)


def note(server: Server, state: str) -> None:
    """Record a state that has lasted for some seconds."""
    time.sleep(4)
    text = urlopen(f"http://{ADDRESS}/metrics").read().decode()
    with Path(OUT).open("a") as lines:
        line = {"state": state, "text": text, "own": server.metrics()}
        lines.write(json.dumps(line) + "\n")
    print(f"=== {state}", flush=True)


def main() -> None:
    """Go through all states."""
    server = Server()
    try:
        server.wait()
        note(server, "started")
        parameters = {"max_new_tokens": 32, "ignore_eos": True}
        for _ in range(4):
            server.post("generate", input_ids=list(range(1, 33)), sampling_params=parameters)
        note(server, "served")
        server.post("release_memory_occupation")
        note(server, "asleep")
        server.post("resume_memory_occupation")
        note(server, "awake")
        server.post("generate", input_ids=list(range(1, 33)), sampling_params=parameters)
        note(server, "served again")
    finally:
        server.end()


if __name__ == "__main__":
    main()
