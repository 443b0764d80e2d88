"""Files that any user may have written are opened safely, or rejected with the problem."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.descriptors import open_descriptors

from torchmem.sample.untrusted import (
    MAX_COMMAS,
    MAX_CONTAINERS,
    MAX_DEPTH,
    FileProblem,
    UntrustedFileError,
    read_untrusted,
    strict_json,
)

MAX_BYTES = 10


def link(path: Path) -> None:
    """Create a link to a valid file."""
    path.with_name("target").write_bytes(b"content")
    path.symlink_to("target")


@pytest.mark.parametrize(
    ("create", "problem"),
    [
        (Path.mkdir, "not_regular"),
        (os.mkfifo, "not_regular"),
        (link, "not_regular"),
        (lambda path: path.write_bytes(b"x" * (MAX_BYTES + 1)), "too_large"),
    ],
)
def test_file_is_rejected_without_leaving_it_open(
    tmp_path: Path, create: Callable[[Path], None], problem: FileProblem
) -> None:
    """The error names the problem, and no file descriptor stays open."""
    path = tmp_path / "file"
    create(path)
    before = open_descriptors()
    with pytest.raises(UntrustedFileError) as raised:
        read_untrusted(path, MAX_BYTES)

    assert problem == raised.value.problem
    assert before == open_descriptors()


def test_file_of_another_user_is_rejected(tmp_path: Path) -> None:
    """A file is rejected unless the expected user owns it."""
    path = tmp_path / "file"
    path.write_bytes(b"content")

    assert read_untrusted(path, MAX_BYTES, os.geteuid())[0] == b"content"
    with pytest.raises(UntrustedFileError, match="belongs to another user"):
        read_untrusted(path, MAX_BYTES, os.geteuid() + 1)


def test_name_in_an_open_directory(tmp_path: Path) -> None:
    """A relative name is looked up in the directory of a file descriptor."""
    (tmp_path / "file").write_bytes(b"content")
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        assert read_untrusted("file", MAX_BYTES, directory=directory)[0] == b"content"
        with pytest.raises(FileNotFoundError):
            read_untrusted("missing", MAX_BYTES, directory=directory)
    finally:
        os.close(directory)


@pytest.mark.parametrize(
    ("document", "refusal"),
    [
        (b"", "is not JSON, or is cut off"),
        (b'{"a": [1,', "is not JSON, or is cut off"),
        (b'"\xff"', "is not JSON, or is cut off"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "is nested too deeply"),
        (b"1" * 400, "has the number 11111111111111111111, which is out of bounds"),
        (b"1" * 5000, "has the number 11111111111111111111, which is out of bounds"),
        (b"[-1e400]", "has the number -1e400, which is out of bounds"),
        (b"NaN", "has the number NaN, which is out of bounds"),
        (b"[" + b"[]," * MAX_CONTAINERS + b"[]]", "has too many values"),
        (b"[" + b"0," * MAX_COMMAS + b"0,0]", "has too many values"),
    ],
    ids=range(11),
)
def test_json_is_bounded(document: bytes, refusal: str) -> None:
    """Depth, numbers and memory of a document are bounded; the refusal completes a sentence."""
    with pytest.raises(ValueError, match=re.escape(refusal)):
        strict_json(document)


def test_json_within_the_bounds() -> None:
    """What is at the bounds is read as it is."""
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    values = [1 << 63, -(1 << 63), 1.5e18, "NaN", None, True, {"a": []}]

    assert json.dumps(strict_json(deep)).encode() == deep
    assert strict_json(json.dumps(values).encode()) == values
