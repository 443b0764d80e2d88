"""Runs Python programs with and without the hook of `torchmem run`, on any Python.

Started as a script, it forks for each program, which costs less than another Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

PLAIN, HOOKED, WATCHED = "plain", "hooked", "watched"
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PYENV = Path.home() / ".pyenv/versions"
SOURCES = tuple(Path(__file__).parents[2].glob("*/src"))
"""The source roots, which together hold the package."""


def pythons() -> list[str]:
    """Return this Python without its environment, and each other one that is found."""
    here = str(Path(sys.executable).resolve())
    others = [version for version in VERSIONS if version != "{}.{}".format(*sys.version_info[:2])]
    found = [_of_pyenv(version) or shutil.which(f"python{version}") for version in others]
    return [here, *filter(None, found)]


def _of_pyenv(version: str) -> str | None:
    return next((str(path) for path in PYENV.glob(f"{version}.*/bin/python")), None)


def outputs(
    programs: Mapping[str, str], mode: str, folder: Path, python: str = sys.executable
) -> dict[str, str]:
    """Return what each program prints, with its traceback; `folder` is first on its sys.path.

    HOOKED programs run as with TORCHMEM=1. WATCHED ones print "imported" when torch has been
    imported.
    """
    done = subprocess.run(
        [python, "-W", "ignore", "-B", __file__, mode, folder],
        input=json.dumps(dict(programs)),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": "", "TORCHMEM": "0"},
    )
    printed: dict[str, str] = json.loads(done.stdout)
    return printed


def main(mode: str, folder: str) -> None:
    """Run the programs in stdin."""
    programs: dict[str, str] = json.load(sys.stdin)
    sys.path[:] = [folder, *(entry for entry in sys.path if "site-packages" not in entry)]
    if mode != PLAIN:
        _hook(mode)
    print(json.dumps({name: _output(code) for name, code in programs.items()}))


def _hook(mode: str) -> None:
    sys.path[:0] = map(str, SOURCES)
    from torchmem.run import autostart
    from torchmem.startup import torch_import

    del sys.path[: len(SOURCES)]
    if mode == HOOKED:
        os.environ["TORCHMEM"] = "1"
        autostart.install()
    else:
        torch_import.after_torch_import(lambda: print("imported"))


def _output(code: str) -> str:
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        return text
    for descriptor in (1, 2):
        os.dup2(writer, descriptor)
    _execute(code)
    os._exit(0)


def _execute(code: str) -> None:
    try:
        exec(compile(code, "program", "exec"), {"__name__": "__main__"})  # noqa: S102
    except BaseException as error:  # noqa: BLE001 - it is the output
        own = error.__traceback__
        assert own is not None
        traceback.print_exception(error.with_traceback(own.tb_next))
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
