"""Run a command on phantom GPUs: python -m torchmem.phantom --gpu-model h100-80gb -- COMMAND."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torchmem.phantom.environment import phantom_environment
from torchmem.phantom.gpus import MAX_GPUS, GpuModel, parse_gpu_model, parse_memory
from torchmem.phantom.torch_build import (
    TorchBuild,
    checked_build,
    find_torch,
    likely_build,
    missing_program,
    script_interpreter,
)
from torchmem.sample.errors import UsageError

MAX_MACHINE = 255
ADDRESS_ORDER = re.compile(r"reuse|ascending|descending|random:\d{1,19}")


class PhantomParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with a pointer to --help."""
        raise UsageError(f"{message}: see {self.prog} --help.")


def main() -> NoReturn:
    """Replace this process with the command. A usage error is one sentence and exit code 2."""
    try:
        _run_command()
    except UsageError as error:
        sys.stderr.write(f"phantom: {error}\n")
        raise SystemExit(2) from None


def _run_command() -> NoReturn:
    arguments = _parser().parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command or not shutil.which(command[0]):
        raise missing_program(command)
    gpu = _gpu(arguments.gpu_model, arguments.memory, os.environ)
    devices, torch = _device_count(arguments.gpus), _torch(command, os.environ)
    environment = phantom_environment(gpu, devices, Path(arguments.state), os.environ, torch)
    environment["PHANTOM_MACHINE"] = _machine(arguments.machine)
    environment["PHANTOM_ADDRESSES"] = _address_order(arguments.addresses)
    os.execvpe(command[0], command, environment)  # noqa: S606 - without a shell on purpose


def _gpu(name: str | None, memory: str | None, environment: Mapping[str, str]) -> GpuModel:
    """Return the GPU of the flags; without flags, the GPU of the enclosing phantom run."""
    if name is None and memory is None:
        name, memory = environment.get("PHANTOM_GPU_MODEL"), environment.get("PHANTOM_MEMORY")
    if name is None:
        return parse_gpu_model(memory or "h100-80gb")
    gpu = parse_gpu_model(name)
    return replace(gpu, memory_bytes=parse_memory(memory)) if memory else gpu


def _torch(command: Sequence[str], environment: Mapping[str, str]) -> TorchBuild | None:
    """Return the PyTorch that the command uses, or None: an exporter needs only NVML."""
    python = script_interpreter(command, environment)
    if python is None:
        return likely_build(environment)
    build = find_torch(python, environment)
    return checked_build(build, python) if build else None


def _device_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_GPUS:
        raise UsageError(f"{text!r} is not a number of GPUs from 1 to {MAX_GPUS}.")
    return int(text)


def _machine(text: str) -> str:
    if not text.isdecimal() or int(text) > MAX_MACHINE:
        raise UsageError(f"{text!r} is not the number of a machine from 0 to {MAX_MACHINE}.")
    return text


def _address_order(text: str) -> str:
    if not ADDRESS_ORDER.fullmatch(text):
        raise UsageError(
            f"{text!r} is not an order of addresses: use reuse, ascending, descending or "
            "random:SEED."
        )
    return text


def _parser() -> PhantomParser:
    """Return the parser. Defaults come from the environment, so that nested runs share a GPU."""
    parser = PhantomParser(
        prog="python -m torchmem.phantom",
        description=__doc__,
        usage=(
            "%(prog)s [--gpu-model h100-80gb] [--memory 80GB] [--gpus 1] [--state DIR] "
            "[--machine 0] [--addresses ORDER] -- COMMAND ..."
        ),
    )
    parser.add_argument(
        "--gpu-model", help="a name from the catalog, or a size such as 24GB (default: h100-80gb)"
    )
    parser.add_argument(
        "--memory",
        help="memory of each GPU; GB is 10^9 bytes, GiB is 2^30 (default: that of the GPU)",
    )
    parser.add_argument(
        "--gpus",
        default=os.environ.get("PHANTOM_DEVICES", "1"),
        help="number of GPUs (default: PHANTOM_DEVICES or 1)",
    )
    _add_machine(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command to run, after --")
    return parser


def _add_machine(parser: PhantomParser) -> None:
    """Declare the flags that describe the machine, except its GPUs."""
    parser.add_argument(
        "--state",
        default=os.environ.get("PHANTOM_STATE_DIR", f"/tmp/phantom-{os.getuid()}"),  # noqa: S108
        help="folder through which processes share the GPUs (default: PHANTOM_STATE_DIR or "
        "%(default)s)",
    )
    parser.add_argument(
        "--machine",
        metavar="NUMBER",
        default=os.environ.get("PHANTOM_MACHINE") or "0",
        help="number of the machine; the GPUs of each have other UUIDs "
        "(default: PHANTOM_MACHINE or 0)",
    )
    parser.add_argument(
        "--addresses",
        metavar="ORDER",
        default=os.environ.get("PHANTOM_ADDRESSES") or "reuse",
        help="where new memory lies: reuse (highest gap), ascending, descending or random:SEED "
        "(default: PHANTOM_ADDRESSES or reuse)",
    )


if __name__ == "__main__":
    main()
