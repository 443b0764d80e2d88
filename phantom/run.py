#!/usr/bin/env python3
"""Run a command on the phantom GPU: `python phantom/run.py --memory 9GB -- python examples/gpt.py`."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
MAX_CARDS = 16
LIBRARY = "libphantom.so"
STANDS_IN_FOR = ("libcuda.so.1", "libnvidia-ml.so.1")


def fail(sentence: str) -> NoReturn:
    """Say what to do in one sentence and exit with code 2."""
    sys.stderr.write(f"phantom: {sentence}\n")
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and a pointer to --help."""
        fail(f"{message}: see {self.prog} --help")


def memory_size(text: str) -> int:
    """Bytes of a size such as 80GB (10^9) or 80GiB (2^30).

    Raises:
        argparse.ArgumentTypeError: the text is no such size, or smaller than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * UNITS[(match[2] or "").upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a memory size; write for example 80GB or 24GiB")
    return size


def device_number(text: str) -> int:
    """Number of cards, 1 to 16.

    Raises:
        argparse.ArgumentTypeError: the text is no such number.
    """
    if not text.isdecimal() or not 1 <= int(text) <= MAX_CARDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of cards from 1 to {MAX_CARDS}")
    return int(text)


def cuda_headers() -> Path:
    """The folder of CUDA headers that Triton, a dependency of every CUDA build of torch, brings along."""
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin).parent / "backends/nvidia/include" if spec and spec.origin else None
    if folder is None or not (folder / "cuda_runtime_api.h").exists():
        fail("no CUDA headers: run this with a Python that has the CUDA build of torch (pip install 'torch===2.13.0')")
    return folder


def compile_library(sources: list[Path], folder: Path) -> None:
    """Compile the sources into `folder`, under the names by which programs ask for them."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler or not shutil.which(compiler):
        fail("no C compiler: install gcc, or name another one in CC")
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-isystem", str(cuda_headers())]
    command += [str(source) for source in sources if source.suffix == ".c"]
    command += [f"-Wl,--version-script={HERE / 'exports.map'}", "-o", str(folder / LIBRARY), "-ldl", "-lpthread"]
    result = subprocess.run(command, check=False)
    if result.returncode:
        fail(f"{compiler} could not build the phantom GPU: its messages are above")
    for name in STANDS_IN_FOR:
        (folder / name).symlink_to(LIBRARY)


def built_library() -> Path:
    """The folder with the library built from these sources and headers; builds it at first use."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in {".c", ".h", ".map"})
    inputs = [*sources, cuda_headers() / "cuda.h"]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in inputs)).hexdigest()[:12]
    folder = BUILD / digest
    if folder.exists():
        return folder
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        fresh = Path(scratch, digest)
        fresh.mkdir()
        compile_library(sources, fresh)
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    return folder


def prepended(name: str, value: str) -> str:
    """The path variable `name` with `value` in front."""
    return f"{value}:{os.environ[name]}" if os.environ.get(name) else value


def parser() -> Parser:
    """The command line. Its defaults come from the environment, so that nested runs share their card."""
    parser = Parser(usage="run.py [--memory 80GB] [--devices 1] [--state DIR] -- COMMAND ...", description=__doc__)
    parser.add_argument(
        "--memory",
        type=memory_size,
        default=os.environ.get("PHANTOM_MEMORY", "80GB"),
        help="memory of each card; GB is 10^9 bytes, GiB is 2^30 (default: PHANTOM_MEMORY or 80GB)",
    )
    parser.add_argument(
        "--devices",
        type=device_number,
        default=os.environ.get("PHANTOM_DEVICES", "1"),
        help="number of cards (default: PHANTOM_DEVICES or 1)",
    )
    parser.add_argument(
        "--state",
        default=os.environ.get("PHANTOM_STATE_DIR", f"/tmp/phantom-{os.getuid()}"),  # noqa: S108 (as processes.c)
        help="folder through which processes share the cards (default: PHANTOM_STATE_DIR or %(default)s)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command to run, after --")
    return parser


def main() -> NoReturn:
    """Build when needed, set the environment, and become the command."""
    arguments = parser().parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command or not shutil.which(command[0]):
        fail(f"cannot run {command[0]!r}: name a program" if command else "no command: name one after --")
    folder = built_library()
    os.environ |= {
        "PHANTOM_MEMORY": str(arguments.memory),
        "PHANTOM_DEVICES": str(arguments.devices),
        "PHANTOM_STATE_DIR": arguments.state,
        "LD_PRELOAD": prepended("LD_PRELOAD", str(folder / LIBRARY)),
        "LD_LIBRARY_PATH": prepended("LD_LIBRARY_PATH", str(folder)),
    }
    os.execvp(command[0], command)  # noqa: S606 (no shell is wanted)


if __name__ == "__main__":
    main()
