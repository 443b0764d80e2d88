"""What a file is, by its first bytes, and which command reads it: for a file given to another one.

The files are untrusted: nothing is unpickled or executed, and only HEAD_BYTES are looked at.
"""

from __future__ import annotations

import re
import shlex
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.untrusted import UntrustedFileError, open_untrusted, sanitize_text

HEAD_BYTES = 64 * 1024
"""How much of a file is looked at; an OOM report is not larger."""
MAX_FILE_BYTES = 1 << 62
GUNZIP = "run `gunzip {file}`"

_KEY = re.compile(rb'"(\w{1,40})"\s*:')
_PID = re.compile(rb'"pid"\s*:\s*(\d{1,10})\b')


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file.

    noun: with its article. next_step: what to do with a file of this kind; `{file}` is its name
    for a shell.
    """

    noun: str
    next_step: str


def _output(command: str, wanted: str) -> FileKind:
    return FileKind(
        f"the JSON output of `torchmem {command}`",
        f"name the {wanted} from which it was made, or read it with jq",
    )


OOM_REPORT = FileKind("an OOM report", "run `torchmem why {file}`")
SNAPSHOT = FileKind("a pickle file, as memory snapshots are", "run `torchmem why {file}`")
SUMMARY = FileKind("the summary of a run", "run `torchmem why {file}`")
SAMPLE = FileKind("the sample of a process", "run `torchmem why{process}`")
PAGE = FileKind("an HTML page", "open it in a browser")
PICTURE = FileKind("a picture", "open it in an image viewer")
COMPRESSED = FileKind("compressed with gzip", f"{GUNZIP} first")
ARCHIVE = FileKind(
    "a zip archive, as torch.save writes it",
    "write a memory snapshot with torch.cuda.memory._dump_snapshot(FILE)",
)
PROFILE = FileKind(
    "a trace of torch.profiler", "open it in https://ui.perfetto.dev, or record a memory snapshot"
)
PREFLIGHT = FileKind(
    "the JSON output of `torchmem preflight`", "read it with jq, or run that again without --json"
)
_BEGINNINGS = {
    b"\x1f\x8b": COMPRESSED,
    b"PK\x03\x04": ARCHIVE,
    b"\x89PNG\r\n": PICTURE,
    b"<svg": PICTURE,
    b"<?xml": PICTURE,
    b"<!doctype html": PAGE,
    b"<html": PAGE,
    **{b"\x80%c" % protocol: SNAPSHOT for protocol in range(2, 6)},
}
# By keys of which each document has all, and no document above it has all.
_DOCUMENTS: tuple[tuple[set[bytes], FileKind], ...] = (
    ({b"phantom", b"gpu_model", b"command"}, PREFLIGHT),
    ({b"devices", b"why", b"heading"}, _output("why --json", "process")),
    ({b"headline", b"oom", b"leaks"}, _output("why --json", "OOM report")),
    ({b"process", b"devices", b"verdict", b"state"}, SUMMARY),
    ({b"process", b"devices", b"timestamp"}, SAMPLE),
    ({b"process", b"device", b"oom"}, OOM_REPORT),
    ({b"fidelity", b"outcomes"}, _output("whatif --json", "snapshot")),
    ({b"rounding_bytes", b"request", b"seconds"}, _output("why --json", "snapshot")),
    ({b"traceEvents"}, PROFILE),
)


def kind_of(head: bytes) -> FileKind | None:
    """Return the kind of a file that starts with `head`; None if it is not known."""
    beginning = head.lstrip()[:64].lower()
    for start, kind in _BEGINNINGS.items():
        if head.startswith(start) or (start[:1] == b"<" and beginning.startswith(start)):
            return kind
    if beginning[:1] not in {b"{", b"["}:
        return None
    keys = set(_KEY.findall(head[:HEAD_BYTES]))
    return next((kind for needed, kind in _DOCUMENTS if needed <= keys), None)


def check_file(path: Path, wanted: FileKind | None, name: str) -> None:
    """Raise the UsageError of `check_kind` for a file; do nothing if it cannot be read."""
    with (
        suppress(OSError, UntrustedFileError, ValueError),
        open_untrusted(path, MAX_FILE_BYTES) as (file, _),
    ):
        check_kind(path, file.read(HEAD_BYTES), wanted, name)


def check_kind(path: Path, head: bytes, wanted: FileKind | None, name: str) -> None:
    """Raise UsageError if the file is known to be of another kind than `wanted`.

    wanted: None if the command reads no file. name: what it reads, with its article. The error
    names the command for the file.
    """
    kind = kind_of(head)
    if kind not in {None, wanted}:
        steps = ", then ".join(_steps(path, head, kind, wanted))
        raise UsageError(f"{sanitize_text(str(path))} is {kind.noun}, not {name}: {steps}.")


def _steps(path: Path, head: bytes, kind: FileKind, wanted: FileKind | None) -> Iterator[str]:
    inner = kind_of(_decompressed(head)) if kind is COMPRESSED else None
    if inner is None:
        yield _step(path, head, kind)
        return
    yield GUNZIP.format(file=_word(path))
    file = path.with_suffix("")
    yield f"name {_word(file)}" if inner is wanted else _step(file, _decompressed(head), inner)


def _step(path: Path, head: bytes, kind: FileKind) -> str:
    return kind.next_step.format(file=_word(path), process=_process(path, head))


def _process(path: Path, head: bytes) -> str:
    """Return the flags for the process of a sample in a run directory."""
    pid = _PID.search(head)
    if pid is None:
        return ""
    folder = path.absolute().parent.parent
    flags = f" --pid {pid[1].decode()}"
    is_published = path.name.endswith(SAMPLE_SUFFIX) and path.parent.name[:1].isdigit()
    return f"{flags} --run-dir {_word(folder)}" if is_published else flags


def _word(path: Path) -> str:
    return shlex.quote(sanitize_text(str(path)))


def _decompressed(head: bytes) -> bytes:
    """Return up to HEAD_BYTES of what gzip compressed; empty if that is damaged."""
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, HEAD_BYTES)
    except zlib.error:
        return b""
