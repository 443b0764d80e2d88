"""Runs scripts on a phantom GPU, each in a process of its own."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import IO, Any

from support.torch_client import Fork

from torchmem.phantom.environment import phantom_environment
from torchmem.phantom.gpus import parse_gpu_model
from torchmem.phantom.torch_build import find_torch

NOT_SET = {"PHANTOM_STATE_DIR", "PYTHONPATH"}
"""Variables of a phantom run that a test may set itself."""
SCRIPT_MEMORY = "16GiB"
SERVER = Path(__file__).with_name("torch_server.py")
CLIENT = Path(__file__).with_name("torch_client.py")


def run_on_phantom(
    *script: str | Path,
    memory: int | str,
    environment: dict[str, str],
    state: Path | None = None,
    devices: int = 1,
    folder: Path | None = None,
    python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script with its arguments, or `-c` and code, on GPUs with `memory` bytes.

    `environment` is added to this process's. `state` is by default its PHANTOM_STATE_DIR. The
    script runs in `folder`, by default in that of this process, with the interpreter `python`.
    """
    gpus = phantom_variables(str(memory), devices, python)
    place = {} if state is None else {"PHANTOM_STATE_DIR": str(state)}
    variables = os.environ | environment | place | gpus
    conf = variables.get("PYTORCH_CUDA_ALLOC_CONF", "")
    server = torch_server(conf if "backend:" in conf else "", python)
    return server.run([*map(str, script)], variables, folder or Path.cwd())


def json_of_script(script: str, folder: Path, *arguments: str) -> Any:
    """Return the last line that a script prints, as JSON; compiled files stay in `folder`.

    The script runs on a GPU of 16 GiB, with json, sys and torch imported.
    """
    path = folder / "script.py"
    path.write_text("import json, sys, torch\n" + script)
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    done = run_on_phantom(
        path, *arguments, memory=SCRIPT_MEMORY, state=folder / "phantom", environment=caches
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@cache
def phantom_variables(memory: str, devices: int, python: str = sys.executable) -> dict[str, str]:
    """Return the variables of `python -m torchmem.phantom`, except NOT_SET."""
    torch = find_torch(python, os.environ)
    cache = {name: value for name, value in os.environ.items() if name == "XDG_CACHE_HOME"}
    set_here = phantom_environment(parse_gpu_model(memory), devices, Path(), cache, torch)
    return {name: value for name, value in set_here.items() if name not in NOT_SET}


class TorchServer:
    """A process that has imported torch, and whose forks run scripts: see torch_server.py.

    To import torch takes seconds of CPU time. PyTorch reads its settings later, except for the
    allocator's backend.
    """

    def __init__(self, alloc_conf: str, python: str = sys.executable) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # to a free abstract address
            listener.listen()
            self._address: bytes = listener.getsockname()
            self._client, theirs = socket.socketpair()
            with theirs:
                descriptors = [listener.fileno(), theirs.fileno()]
                self._process = subprocess.Popen(
                    [python, "-W", "ignore", SERVER, *map(str, descriptors)],
                    env=os.environ
                    | phantom_variables(SCRIPT_MEMORY, 1, python)
                    | {"PYTORCH_CUDA_ALLOC_CONF": alloc_conf},
                    stdin=subprocess.DEVNULL,
                    pass_fds=descriptors,
                )

    def run(
        self, arguments: list[str], environment: dict[str, str], folder: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -W ignore` with these arguments, for at most ten minutes."""
        temporary = tempfile.TemporaryFile
        with Path(os.devnull).open("rb") as nothing, temporary() as output, temporary() as errors:
            files: list[IO[bytes]] = [nothing, output, errors]
            fork = Fork(self._address, arguments, environment, folder, files)
            exit_code = fork.wait(timeout=600)
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(arguments, exit_code, *texts)

    def python(self) -> tuple[str, ...]:
        """Return the start of a command that runs a script in a fork, in its own environment.

        As with `python -W ignore`, a path and arguments follow. To the command's parent, the fork
        is not a child: it gets SIGTERM, but not SIGKILL.
        """
        return sys.executable, "-S", str(CLIENT), self._address[1:].decode()

    def close(self) -> None:
        """End the process."""
        self._client.close()
        self._process.wait()


def torch_server(alloc_conf: str = "", python: str = sys.executable) -> TorchServer:
    """Return the server of this process, which ends with it."""
    return _server(alloc_conf, python)


@cache  # of torch_server, it would keep an omitted argument and its default apart
def _server(alloc_conf: str, python: str) -> TorchServer:
    server = TorchServer(alloc_conf, python)
    atexit.register(server.close)
    return server
