"""What its author calls this program: after its script, its notebook, or the job that it is.

Launchers that unpickle a function have a script of their own, and so have the kernels of notebooks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

from torchmem.host.procfs import read_file
from torchmem.sdk.safety.interruptions import ignore

# `sys.argv[0]` without a script.
NO_SCRIPT = {"", "-c", "-m"}

# `sys.argv[0]` in a notebook, and the variable in which Jupyter Server 2 gives its path.
KERNEL_LAUNCHERS = {"ipykernel_launcher.py", "colab_kernel_launcher.py"}
NOTEBOOK_VARIABLE = "JPY_SESSION_NAME"
NOTEBOOK_SUFFIX = ".ipynb"
# Names in a notebook: VS Code's of its file, and papermill's with --inject-input-path.
NOTEBOOK_NAMES = ("__vsc_ipynb_file__", "PAPERMILL_INPUT_PATH")
# Commands that execute a notebook in a kernel that is their child.
PAPERMILL = "papermill"
EXECUTORS = {PAPERMILL, "nbconvert", "jupyter-nbconvert", "jupyter-execute", "execute"}

# `sys.argv[0]` of a process that runs tasks and actors of Ray, and of submitit's jobs.
RAY_WORKER = "ray/_private/workers/default_worker.py"
SUBMITIT_JOB = "submitit/core/_submit.py"
# Where submitit calls the function of a job, as `self.function`.
_SUBMITIT_CALL = "submitit/core/utils.py"


@dataclass(frozen=True, slots=True)
class NamedProgram:
    """The name for a run, and the file name of the script or notebook; None if it is unknown."""

    name: str
    script: str | None = None

    @classmethod
    def at(cls, path: str) -> NamedProgram:
        """Return the program whose script or notebook is at a path."""
        return cls(script_name(path), Path(path).name)


def program(environment: Mapping[str, str]) -> NamedProgram:
    """Return what runs in this process."""
    path = sys.argv[0] if sys.argv else ""
    if Path(path).name in KERNEL_LAUNCHERS:
        notebook = _notebook(environment)
        return (
            NamedProgram.at(notebook) if notebook else NamedProgram(Path.cwd().name or "notebook")
        )
    if path.endswith(SUBMITIT_JOB):
        return _hydra_job() or _submitted() or NamedProgram("submitit")
    if path in NO_SCRIPT or path.endswith(RAY_WORKER):
        return NamedProgram(script_name(path))
    return NamedProgram.at(path)


def script_name(path: str) -> str:
    """Return the name of a run after its script: `train` for train.py or `python -m train`.

    It is "python" without a script, as with `python -c`, and "ray" in a worker process of Ray.
    """
    if path.endswith(RAY_WORKER):
        return "ray"
    script = Path(path)
    name = script.parent.name if script.stem == "__main__" else script.stem
    return "python" if path in NO_SCRIPT else name or "python"


def _notebook(environment: Mapping[str, str]) -> str | None:
    """Return the path of the notebook that this kernel executes; None if it is unknown."""
    names = vars(sys.modules["__main__"])
    known = (environment.get(NOTEBOOK_VARIABLE), *map(names.get, NOTEBOOK_NAMES))
    for path in known:
        if isinstance(path, str) and path.endswith(NOTEBOOK_SUFFIX):
            return path
    return _executed((read_file(f"/proc/{os.getppid()}/cmdline") or "").split("\0"))


def _executed(command: Sequence[str]) -> str | None:
    """Return the only notebook that a command executes; papermill writes the second one."""
    programs = {Path(word).name for word in command[:3]} & EXECUTORS
    given = [word for last, word in pairwise(command) if last != "--output"]
    notebooks = [word for word in given if word.endswith(NOTEBOOK_SUFFIX)]
    if not programs or not notebooks or (len(notebooks) > 1 and PAPERMILL not in programs):
        return None
    return notebooks[0]


def _hydra_job() -> NamedProgram | None:
    """Return the job of Hydra that runs in this process, with the name in its configuration."""
    hydra: Any = sys.modules.get("hydra.core.hydra_config")
    with ignore(Exception):
        if hydra is not None and hydra.HydraConfig.initialized():
            return NamedProgram(str(hydra.HydraConfig.get().job.name))
    return None


def _submitted() -> NamedProgram | None:
    """Return the program after the file with the function that submitit calls now."""
    with ignore(Exception):
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
        while frame is not None:
            if frame.f_code.co_filename.endswith(_SUBMITIT_CALL) and "self" in frame.f_locals:
                path = _file(frame.f_locals["self"].function)
                return NamedProgram.at(path) if path else None
            frame = frame.f_back
    return None


def _file(function: Any) -> str | None:
    """Return the file of a function, a partial one, or an object that can be called.

    cloudpickle keeps it among the globals, and not in the code.
    """
    function = getattr(function, "func", function)
    if not isinstance(function, FunctionType):
        function = type(function).__call__
    path = function.__globals__.get("__file__")
    return path if isinstance(path, str) else None
