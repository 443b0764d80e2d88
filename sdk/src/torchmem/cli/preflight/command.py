"""The command to try: what can be run, and how an option of it is set."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import takewhile
from pathlib import PurePath

from torchmem.core.errors import UsageError
from torchmem.core.untrusted import harmless

LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "mpiexec", "orterun", "srun"})
LAUNCHER_MODULES = frozenset({
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner",
})  # fmt: skip


def checked_command(words: Sequence[str]) -> tuple[str, ...]:
    """What stands after `--`; raises UsageError when it cannot be tried."""
    command = tuple(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise UsageError("there is no command to try: name one after --, as in -- python train.py.")
    launcher = _launcher(command)
    if launcher:
        raise UsageError(
            f"{launcher} starts many processes, and a preflight is one of them: name the script itself (-- python "
            "train.py ...) and tell its place with --world-size and --rank."
        )
    if not shutil.which(command[0]):
        raise UsageError(f"there is no program {harmless(command[0])!r}: name one that can be run, as python train.py.")
    return command


def _launcher(command: Sequence[str]) -> str | None:
    """The launcher among the words before the script, if there is one."""
    before = list(takewhile(lambda word: not word.endswith((".py", ".sh")), command))
    for word, following in zip(before, [*before[1:], ""], strict=True):
        if PurePath(word).name in LAUNCHERS:
            return PurePath(word).name
        if word == "-m" and following in LAUNCHER_MODULES:
            return following
    return None


def option_of(command: Sequence[str], name: str) -> str:
    """How the script calls the option `name`: as given with dashes, as `name=` where it stands so, else `--name`."""
    if name.startswith("-") or any(word.startswith(f"{name}=") for word in command):
        return name
    return f"--{name}"


def with_option(command: Sequence[str], option: str, value: int) -> tuple[str, ...]:
    """The command with an option set to `value`, in place of what it has there, else at its end."""
    words = list(command)
    for place, word in enumerate(words):
        if word.startswith(f"{option}="):
            words[place] = f"{option}={value}"
            return tuple(words)
        if word == option and place + 1 < len(words):
            words[place + 1] = str(value)
            return tuple(words)
    return (*words, option, str(value))
