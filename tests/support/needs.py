"""What tests need of the machine. A test without it is skipped, with the command that installs it.

The end of a run counts the skipped tests by these reasons.
"""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {
    "amtool": "prometheus-alertmanager",
    "cc": "gcc libc6-dev",
    "mpirun": "openmpi-bin",
    "nm": "binutils",
    "node": "nodejs npm",
    "npm": "nodejs npm",
    "promtool": "prometheus",
    "systemd-analyze": "systemd",
    "systemd-sysusers": "systemd",
    "systemd-tmpfiles": "systemd",
    "unshare": "util-linux",
    "vmalert": "victoria-metrics",
}
"""Debian's package of each program, where it has another name."""


def missing(*programs: str) -> str | None:
    """Return which of the programs are not on PATH, and how to install them; None if all are."""
    absent = [program for program in programs if not shutil.which(program)]
    if not absent:
        return None
    packages = dict.fromkeys(PACKAGES.get(program, program) for program in absent)
    return f"no {', '.join(absent)} on PATH: apt-get install {' '.join(packages)}"


def needs(*programs: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test without these programs."""
    reason = missing(*programs)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def skip_without(*programs: str) -> None:
    """Skip the running test without these programs."""
    if reason := missing(*programs):
        pytest.skip(reason)


def no_compiler() -> str | None:
    """Return that there is no C compiler and how to install one; None if there is one."""
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    return None if found else f"no C compiler: apt-get install {PACKAGES['cc']}"


def compiler() -> str:
    """Return the C compiler. Skip the running test if there is none."""
    if reason := no_compiler():
        pytest.skip(reason)
    return os.environ.get("CC") or shutil.which("cc") or "gcc"
