"""Where a page is written: to a file that is replaced as a whole, or to stdout."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text

STDOUT = Path("-")
SUFFIXES = {".html", ".htm"}


def check(path: Path) -> None:
    """Raise UsageError if a page cannot have this name, so that no report is overwritten."""
    if path == STDOUT or path.suffix.lower() in SUFFIXES or _is_special(path):
        return
    name = sanitize_text(path.name)
    raise UsageError(f"--html writes a page: name a file that ends in .html, not {name!r}.")


def write(content: bytes, path: Path) -> None:
    """Write a page, and name its file on stderr. Raise UsageError.

    A reader of the file sees the old page or the new one.
    """
    name = sanitize_text(str(path))
    try:
        if path == STDOUT:
            sys.stdout.buffer.write(content)
            sys.stdout.flush()
        elif _is_special(path):
            path.write_bytes(content)
        else:
            # Resolved, because replacing a link would leave its target as it was.
            _replace(path.resolve(), content)
            print(f"torchmem: {name} written.", file=sys.stderr)
    except OSError as error:
        reason = error.strerror or "unknown"
        raise UsageError(
            f"{name} cannot be written ({reason}): name another file with --html."
        ) from None


def _is_special(path: Path) -> bool:
    """Return whether this is a device or a pipe, which is written and not replaced."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _replace(path: Path, content: bytes) -> None:
    if path.is_dir():
        raise IsADirectoryError(0, "it is a directory")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
