"""What a file is, and the command that reads it."""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.publishing import own_process, own_sample, publish
from support.recordings import varying_lengths
from support.reports import STRANDED

from torchmem.explain.oom_report import encode
from torchmem.sample import sample
from torchmem.sample.errors import UsageError
from torchmem.sample.file_kinds import (
    HEAD_BYTES,
    OOM_REPORT,
    SNAPSHOT,
    FileKind,
    check_file,
    kind_of,
)

GOLDEN = Path(__file__).parents[1] / "preflight" / "golden" / "fits.json"
REPORT = encode(STRANDED)
PICKLE = pickle.dumps(varying_lengths(steps=30).snapshot())
PAGE = b"\n<!DOCTYPE html>\n<html lang='en'></html>"


def zipped() -> bytes:
    """Return a zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.pkl", b"")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (REPORT, "an OOM report, not THIS: run `torchmem why FILE`"),
        (PICKLE, "a pickle file, as memory snapshots are, not THIS: run `torchmem why FILE`"),
        (
            sample.encode(own_sample(process=own_process(pid=7, labels={"oom": "0"}))),
            "the sample of a process, not THIS: run `torchmem why --pid 7`",
        ),
        (
            GOLDEN.read_bytes(),
            (
                "the JSON output of `torchmem preflight`, not THIS: read it with jq, or run that "
                "again without --json"
            ),
        ),
        (PAGE, "an HTML page, not THIS: open it in a browser"),
        (b"\x89PNG\r\n\x1a\n", "a picture, not THIS: open it in an image viewer"),
        (
            gzip.compress(b"x" * 100),
            "compressed with gzip, not THIS: run `gunzip FILE` first",
        ),
        (
            zipped(),
            (
                "a zip archive, as torch.save writes it, not THIS: write a memory snapshot with "
                "torch.cuda.memory._dump_snapshot(FILE)"
            ),
        ),
    ],
    ids=["oom", "snapshot", "sample", "preflight", "page", "png", "gzip", "zip"],
)
def test_a_file_of_another_kind_is_named_with_its_command(
    tmp_path: Path, content: bytes, sentence: str
) -> None:
    """The sentence says what the file is, and what to do with it."""
    path = tmp_path / "file"
    path.write_bytes(content)
    wanted = (SNAPSHOT, "THIS") if content == REPORT else (OOM_REPORT, "THIS")

    with pytest.raises(UsageError) as refused:
        check_file(path, *wanted)

    assert str(refused.value) == f"{path} is {sentence}.".replace("FILE`", f"{path}`")


@pytest.mark.parametrize(
    ("wanted", "then"), [(OOM_REPORT, "run `torchmem why FILE`"), (SNAPSHOT, "name FILE")]
)
def test_a_compressed_snapshot_has_two_steps(tmp_path: Path, wanted: FileKind, then: str) -> None:
    """What is inside of a gzip file is recognized from its beginning."""
    path = tmp_path / "a snapshot.gz"
    path.write_bytes(gzip.compress(PICKLE))

    with pytest.raises(UsageError) as refused:
        check_file(path, wanted, "one")

    steps = f": run `gunzip '{path}'`, then {then}."
    assert str(refused.value).endswith(steps.replace("FILE", f"'{tmp_path}/a snapshot'"))


def test_a_published_sample_leads_to_its_process(tmp_path: Path) -> None:
    """The command for a sample in a run directory has the process and the directory."""
    path = publish(tmp_path, own_sample(process=own_process(pid=7)))

    with pytest.raises(UsageError, match=f"`torchmem why --pid 7 --run-dir {tmp_path}`"):
        check_file(path, OOM_REPORT, "an OOM report")


@pytest.mark.parametrize("content", [b"", b"hello", b"{", b"{}", b"[1, 2]", b"\x00" * 99])
def test_other_files_are_not_named(tmp_path: Path, content: bytes) -> None:
    """A file of an unknown kind is left to the command, like one that cannot be read."""
    path = tmp_path / "file"
    path.write_bytes(content)

    for unknown in (path, tmp_path, tmp_path / "missing"):
        check_file(unknown, OOM_REPORT, "an OOM report")
    assert kind_of(content) is None


@given(head=st.binary(max_size=2 * HEAD_BYTES))
def test_any_bytes_are_recognized_or_not(head: bytes) -> None:
    """No content raises another error."""
    assert kind_of(head) is None or kind_of(head + b"more") is not None
