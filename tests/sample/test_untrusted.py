"""Files that any user may have written are opened safely, or rejected with the problem."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.descriptors import open_descriptors

from torchmem.sample.untrusted import FileProblem, UntrustedFileError, read_untrusted

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
