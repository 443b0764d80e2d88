"""The command of `torchmem run`: its environment, and how it replaces this process."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from torchmem.run.autostart import ON, VARIABLE
from torchmem.sample.errors import TorchmemError, UsageError, program_advice
from torchmem.sample.untrusted import sanitize_text

STARTUP = Path(__file__).resolve().parent / "startup"
# Exit codes of env(1) and of shells.
NOT_EXECUTABLE, NOT_FOUND = 126, 127
# Python ignores these signals, and a program that it starts would inherit that.
RESTORED_SIGNALS = ("SIGPIPE", "SIGXFZ", "SIGXFSZ")


class CommandError(TorchmemError):
    """The command cannot be started; `exit_code` is the one that a shell would return."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def advised(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment with the setting that earlier attempts advise; print that setting.

    Raises UsageError if the run has no name.
    """
    name = environment.get("TORCHMEM_RUN")
    if not name:
        raise UsageError(
            "--apply-advice finds earlier attempts by the name of the run: add --name NAME."
        )
    try:
        from torchmem.run.advice import find_advice, installed_torch

        advice = find_advice(name, environment, installed_torch())
        if advice.sentence:
            print(f"torchmem: {advice.sentence}", file=sys.stderr, flush=True)
    except Exception as error:  # noqa: BLE001 - the command must start
        with suppress(OSError):
            print(f"torchmem: no advice is applied: {error}", file=sys.stderr)
        return environment
    return {**environment, **advice.environment}


def child_environment(
    base: Mapping[str, str], settings: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the environment of the command; `settings` that are None stay as they are."""
    given = {name: value for name, value in settings.items() if value is not None}
    path = [str(STARTUP), *filter(None, [base.get("PYTHONPATH")])]
    return {**base, **given, VARIABLE: ON, "PYTHONPATH": os.pathsep.join(path)}


def execute(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process. Raises CommandError."""
    program = shutil.which(command[0])
    name = sanitize_text(command[0])
    if program is None:
        code = NOT_EXECUTABLE if Path(name).is_file() else NOT_FOUND
        raise CommandError(f"{name} is not a program: {program_advice(name)}", code)
    # What Python still holds in its buffers is lost in execve.
    sys.stdout.flush()
    for signal_name in RESTORED_SIGNALS:
        if hasattr(signal, signal_name):
            signal.signal(getattr(signal, signal_name), signal.SIG_DFL)
    try:
        os.execve(program, command, environment)  # noqa: S606 - without a shell, as intended
    except OSError as error:
        raise CommandError(
            f"{name} cannot be started ({error.strerror}): check the file.", NOT_EXECUTABLE
        ) from None
