"""Checks of the run directory, and of the pid namespace."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from torchmem.allocator.sizes import format_size
from torchmem.doctor import processes
from torchmem.doctor.check import Check, Place
from torchmem.host.process_table import INITIAL_PID_NAMESPACE
from torchmem.host.procfs import pid_namespace
from torchmem.sample.run_directory import RUN_DIR_MODE

MIN_FREE_BYTES = 1 << 20
MIN_FREE_INODES = 64


def checks(place: Place) -> Iterator[Check]:
    """Yield the checks of the run directory and of the processes that publish in it."""
    directory = place.directory
    try:
        status = directory.stat()
    except FileNotFoundError:
        yield _missing(directory)
        return
    except OSError as error:
        yield Check(
            "run directory",
            "problem",
            f"{directory} cannot be read ({error.strerror})",
            "Set TORCHMEM_RUN_DIR to another directory, for the training and for the exporter.",
        )
        return
    yield _mode(directory, status)
    if not stat.S_ISDIR(status.st_mode):
        return
    yield _room(directory)
    yield _own_directory(directory)
    yield from processes.checks(directory)
    yield _pids(place)


def _missing(directory: Path) -> Check:
    found = f"{directory} does not exist"
    parent = directory.parent
    if os.access(parent, os.W_OK):
        return Check("run directory", "note", f"{found}; the first process creates it")
    return Check(
        "run directory",
        "problem",
        f"{found}, and this user cannot create it in {parent}",
        f"Create it as root: install -d -m {RUN_DIR_MODE:o} {directory}",
    )


def _mode(directory: Path, status: os.stat_result) -> Check:
    mode, name = stat.S_IMODE(status.st_mode), f"{directory}, mode {stat.S_IMODE(status.st_mode):o}"
    if not stat.S_ISDIR(status.st_mode):
        step = "Remove it, or set TORCHMEM_RUN_DIR to a directory."
        return Check("run directory", "problem", f"{directory} is not a directory", step)
    if not os.access(directory, os.W_OK | os.X_OK):
        step = f"As root: chmod {RUN_DIR_MODE:o} {directory}"
        return Check("run directory", "problem", f"{name}: this user cannot write to it", step)
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        step = f"As its owner: chmod {RUN_DIR_MODE:o} {directory}"
        found = f"{name}: every user can remove other users' directories"
        return Check("run directory", "problem", found, step)
    if status.st_uid not in {0, os.geteuid()}:
        found = f"{name}: it belongs to user {status.st_uid}, who can remove everything in it"
        return Check("run directory", "note", found, "Have root create it before the first job.")
    return Check("run directory", "ok", name)


def _room(directory: Path) -> Check:
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    is_short = free < MIN_FREE_BYTES or (room.f_files and room.f_ffree < MIN_FREE_INODES)
    inodes = f", {room.f_ffree:,} inodes" if room.f_files else ""
    found = f"{format_size(free)}{inodes} free"
    if is_short:
        step = "Remove what fills the file system, or enlarge it: see TorchmemRunDirectoryFull."
        return Check("its file system", "problem", found, step)
    return Check("its file system", "ok", found)


def _own_directory(directory: Path) -> Check:
    """Return whether the name of this user's directory is free or this user's."""
    own = directory / str(os.geteuid())
    try:
        status = own.stat(follow_symlinks=False)
    except OSError:
        return Check("your directory", "note", f"{own} does not exist yet")
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        return Check(
            "your directory",
            "note",
            f"{own} was taken by user {status.st_uid}, so your processes use {own}-…",
            "Ask root to remove it.",
        )
    return Check("your directory", "ok", str(own))


def _pids(place: Place) -> Check:
    namespace = pid_namespace("self", place.proc)
    if namespace == INITIAL_PID_NAMESPACE:
        return Check("pid namespace", "ok", "the node's own")
    return Check(
        "pid namespace",
        "note",
        "not the node's own, as in a container",
        "An exporter here needs `pid: host` (docker run --pid host, Kubernetes hostPID) to join "
        "ranks with NVML's processes; a training process needs nothing.",
    )
