"""Reading snapshot files: everything that PyTorch writes is read, and no other file does harm."""

from __future__ import annotations

import copy
import gzip
import io
import os
import pickle
import random
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recordings import RecordedJob, varying_lengths, write
from support.snapshot_versions import LATER_KEYS, as_20, older
from support.snapshots import REAL_GPUS, of_real_gpu

from torchmem.allocator.sizes import MIB
from torchmem.sample.capture_messages import FACTS_KEY
from torchmem.sample.errors import UsageError
from torchmem.trace import read, reading
from torchmem.trace.checked_values import InvalidSnapshotError
from torchmem.trace.content import check
from torchmem.trace.reading import MAX_PLACES
from torchmem.trace.recording import CaptureFacts
from torchmem.trace.worker import load

Snapshot = dict[str, Any]
Change = Callable[[Snapshot], object]


@pytest.fixture(scope="module")
def job() -> RecordedJob:
    return varying_lengths(steps=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank0.pickle"


def facts_of(job: RecordedJob, max_entries: int = 100_000) -> dict[str, Any]:
    """Return what a capture adds, for a recording that begins with these segments."""
    return {
        "versions": {"torch": "2.12.1+cu130", "cuda": "13.0"},
        "max_entries": max_entries,
        "segments": job.segments(),
        "devices": {0: {"total_bytes": 80, "limit_bytes": 60, "allocated_peak_bytes": 50}},
    }


def test_the_facts_of_a_capture_are_read(job: RecordedJob, path: Path) -> None:
    """Version, sizes and blocks are read; blocks only if the trace was not overwritten."""
    snapshot = job.snapshot()
    (recording,) = read(write(snapshot | {FACTS_KEY: facts_of(job)}, path))
    (overwritten,) = read(write(snapshot | {FACTS_KEY: facts_of(job, 3)}, path))
    (plain,) = read(write(snapshot, path))
    in_use = {
        block["address"]: block["size"]
        for segment in job.segments()
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }

    assert in_use == recording.facts.block_sizes
    sizes = recording.facts.total_bytes, recording.facts.limit_bytes, recording.facts.free_bytes
    assert (recording.facts.torch_version, sizes) == ("2.12.1+cu130", (80, 60, None))
    assert recording.facts.allocated_peak_bytes == 50
    assert replace(recording.facts, block_sizes={}) == overwritten.facts
    assert CaptureFacts() == plain.facts


@pytest.mark.parametrize(
    "facts",
    [
        [],
        {},
        {"versions": {"torch": 2.13}},
        {"versions": {"torch": "2" * 200}},
        {"versions": {}, "segments": [{}]},
        {"versions": {}, "segments": [], "devices": []},
        {"versions": {}, "segments": [], "devices": {0: {"total_bytes": -1}}},
        {"versions": {}, "segments": [], "devices": {0: {"total_bytes": "1"}}},
        {"versions": {}, "segments": [], "devices": {0: 1}, "max_entries": 1 << 70},
        {"versions": {str(n): "" for n in range(1000)}, "segments": [], "devices": {}},
    ],
)
def test_facts_that_no_capture_has_are_one_sentence(
    job: RecordedJob, path: Path, facts: object
) -> None:
    """Whatever the key holds, the error says that the file is damaged."""
    with pytest.raises(UsageError, match="is not a snapshot as PyTorch"):
        read(write(job.snapshot() | {FACTS_KEY: facts}, path))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_everything_that_a_replay_needs_is_read(
    job: RecordedJob, path: Path, protocol: int
) -> None:
    """Segments, blocks, events and settings are read, under every pickle protocol."""
    snapshot = job.snapshot()
    (recording,) = read(write(snapshot, path, protocol))

    assert (
        recording.name,
        recording.device,
        recording.truncated,
        recording.ignored,
    ) == ("rank0.pickle", 0, False, 0)
    assert snapshot["allocator_settings"] == recording.settings
    assert [(e["action"], e["addr"], e["size"], e["stream"], e["pool_id"]) for e in job.trace] == [
        (e.action, e.address, e.size, e.stream, e.pool) for e in recording.events
    ]
    for expected, segment in zip(snapshot["segments"], recording.segments, strict=True):
        fields = asdict(segment)
        assert expected["segment_type"] == ("small" if fields["is_small"] else "large")
        assert expected["segment_pool_id"] == fields["pool"]
        for name in ("address", "total_size", "stream", "is_expandable"):
            assert expected[name] == fields[name]
        assert [{**block, "frames": None} for block in expected["blocks"]] == [
            {**block, "frames": None} for block in fields["blocks"]
        ]


def test_an_oom_has_the_free_bytes_of_the_driver(path: Path) -> None:
    """The event of an OOM has device_free and no address."""
    job = RecordedJob(gpu_bytes=600 * MIB)
    assert job.alloc(MIB)
    assert job.alloc(200 * MIB) is None
    (recording,) = read(write(job.snapshot(), path))

    oom = recording.events[-1]
    assert (oom.action, oom.address, oom.size, oom.device_free) == ("oom", 0, 200 * MIB, 86 * MIB)


def test_each_device_with_a_trace_is_a_recording(path: Path) -> None:
    """Devices keep their index; a device with segments but without a trace is left out."""
    jobs = [RecordedJob(device=device) for device in range(3)]
    for number, job in enumerate(jobs):
        job.alloc((number + 1) * MIB)
    snapshot = jobs[2].snapshot()
    snapshot["device_traces"] = [jobs[0].trace, [], jobs[2].trace]
    snapshot["segments"] = [segment for job in jobs for segment in job.segments()]
    recordings = read(write(snapshot, path))

    assert [
        (recording.device, len(recording.segments), recording.events[-1].size)
        for recording in recordings
    ] == [(0, 1, MIB), (2, 1, 3 * MIB)]


@pytest.mark.parametrize("removed", range(len(LATER_KEYS) + 1))
def test_snapshots_of_older_versions_are_read(job: RecordedJob, path: Path, removed: int) -> None:
    """Without the keys that were added since 2.1, the recording is equal but for the settings."""
    (new,) = read(write(job.snapshot(), path))
    (old,) = read(write(older(job.snapshot(), removed), path))

    assert (new.events, new.segments) == (old.events, old.segments)
    assert bool(old.settings) is (removed < len(LATER_KEYS))


def test_snapshots_of_pytorch_2_0_are_read(job: RecordedJob, path: Path) -> None:
    """Addresses follow from the sizes, and requests from the newest allocation of a block."""
    (new,) = read(write(job.snapshot(), path))
    (old,) = read(write(as_20(job.snapshot()), path))

    assert new.events == old.events
    for segment, other in zip(new.segments, old.segments, strict=True):
        known = [
            replace(block, requested_size=None) if block.state == "inactive" else block
            for block in segment.blocks
        ]
        assert (segment.address, known) == (other.address, list(other.blocks))


def test_without_pools_an_event_is_in_the_pool_of_its_segment(job: RecordedJob, path: Path) -> None:
    """Before PyTorch 2.12 the pool of an event is that of the final segment at its address."""
    snapshot = copy.deepcopy(job.snapshot())
    snapshot = older(snapshot, len(LATER_KEYS))
    private = snapshot["segments"][0]
    private["segment_pool_id"] = (0, 7)
    (recording,) = read(write(snapshot, path))
    end = private["address"] + private["total_size"]

    assert {event.pool for event in recording.events} == {(0, 0), (0, 7)}
    for event in recording.events:
        assert (private["address"] <= event.address < end) == (event.pool == (0, 7))


def test_expandable_segments_and_streams_are_read(job: RecordedJob, path: Path) -> None:
    """Mapping events, expandable segments and stream handles are read."""
    snapshot = copy.deepcopy(job.snapshot())
    for entry in snapshot["device_traces"][0]:
        entry["action"] = (
            entry["action"]
            .replace("segment_alloc", "segment_map")
            .replace("segment_free", "segment_unmap")
        )
        entry["stream"] = 94_000_000_000_000
    for segment in snapshot["segments"]:
        segment["is_expandable"] = True
    (recording,) = read(write(snapshot, path))

    assert "segment_map" in {event.action for event in recording.events}
    assert {event.stream for event in recording.events} == {94_000_000_000_000}
    assert all(segment.is_expandable for segment in recording.segments)


def many_streams(snapshot: Snapshot, number: int) -> None:
    (event, *_), (trace,) = snapshot["device_traces"][0], snapshot["device_traces"]
    trace += [event | {"stream": stream} for stream in range(1, number)]


def many_pools(snapshot: Snapshot, number: int) -> None:
    (event, *_), (trace,) = snapshot["device_traces"][0], snapshot["device_traces"]
    trace += [event | {"pool_id": (0, pool)} for pool in range(1, number)]


def many_segments(snapshot: Snapshot, number: int) -> None:
    first, size = snapshot["segments"][0], snapshot["segments"][0]["total_size"]
    for stream in range(1, number):
        block = {"address": stream << 40, "size": size, "state": "inactive"}
        changes = {"address": stream << 40, "stream": stream, "blocks": [block]}
        snapshot["segments"].append(first | changes)


def many_on_devices(snapshot: Snapshot, number: int) -> None:
    event = next(event for event in snapshot["device_traces"][0] if event["action"] == "alloc")
    traces = [[event | {"stream": stream} for stream in range(number // 8)] for _ in range(8)]
    snapshot.update(device_traces=traces, segments=[])


@pytest.mark.parametrize("many", [many_streams, many_pools, many_segments, many_on_devices])
def test_streams_and_pools_are_limited(
    job: RecordedJob, path: Path, many: Callable[[Snapshot, int], None]
) -> None:
    """A snapshot with thousands of them, which would take minutes to replay, is one sentence."""
    most, too_many = (copy.deepcopy(job.snapshot()) for _ in range(2))
    many(most, MAX_PLACES)
    many(too_many, MAX_PLACES + 8)

    assert read(write(most, path))
    with pytest.raises(UsageError, match=r"more than 1,024 combinations of device, stream and"):
        read(write(too_many, path))


def lose_allocs(snapshot: Snapshot) -> None:
    """Remove the entries of the first blocks, as a full ring buffer does."""
    del snapshot["device_traces"][0][:4]


def strip_stacks(snapshot: Snapshot) -> None:
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []


@pytest.mark.parametrize(
    ("changes", "truncated"),
    [
        ((), False),
        ((lose_allocs,), True),
        ((lose_allocs, strip_stacks), None),
        ((strip_stacks,), False),
    ],
)
def test_a_full_ring_buffer_is_detected_where_possible(
    job: RecordedJob, path: Path, changes: tuple[Change, ...], truncated: bool | None
) -> None:
    """A live block with a stack but no allocation proves it; a complete trace disproves it."""
    snapshot = copy.deepcopy(job.snapshot())
    for change in changes:
        change(snapshot)
    (recording,) = read(write(snapshot, path))

    assert recording.truncated is truncated


def test_entries_that_do_not_affect_memory_are_counted(job: RecordedJob, path: Path) -> None:
    """Annotations among the events, as PyTorch 2.14 writes them, are skipped."""
    snapshot = copy.deepcopy(job.snapshot())
    snapshot["device_traces"][0].insert(
        3, {"action": "annotate", "addr": 0, "size": 0, "stream": 0, "frames": []}
    )
    (recording,) = read(write(snapshot, path))

    assert (1, len(job.trace)) == (recording.ignored, len(recording.events))


def first_event(**values: object) -> Change:
    return lambda snapshot: snapshot["device_traces"][0][0].update(values)


def first_segment(**values: object) -> Change:
    return lambda snapshot: snapshot["segments"][0].update(values)


def first_block(**values: object) -> Change:
    return lambda snapshot: snapshot["segments"][0]["blocks"][0].update(values)


def only(*actions: str) -> Change:
    def keep(snapshot: Snapshot) -> None:
        snapshot["device_traces"] = [
            [e for e in snapshot["device_traces"][0] if e["action"] in actions]
        ]

    return keep


NOT_AS_WRITTEN = "is not a snapshot as PyTorch 2.0 and newer write it"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda s: s.update(device_traces=[]),
            "has segments but no trace of allocations. To record one",
        ),
        (lambda s: s.update(device_traces=[[]]), "or run `torchmem capture --rank N`."),
        (
            lambda s: s.update(device_traces=[[]], segments=[]),
            "has no GPU memory, as in a run on the CPU",
        ),
        (lambda s: s.pop("segments"), f"{NOT_AS_WRITTEN} (it has no segments and device_traces)"),
        (lambda s: s.update(device_traces=[[]] * 129), "more devices than PyTorch supports"),
        (lambda s: s.update(allocator_settings=5), "allocator_settings is not a dict"),
        (lambda s: s["device_traces"].append(7), "the trace of device 1 is not a list"),
        (lambda s: s["device_traces"][0].append(7), "is not a dict"),
        (lambda s: s["segments"].append(s["segments"][0]), "segments overlap"),
        (
            only("free_requested", "free_completed"),
            "has a trace without allocations: record while the job is training",
        ),
        (only("alloc", "free_requested"), "has no free_completed events"),
        (
            first_event(action="teleport"),
            "has an action that this version of torchmem does not know ('teleport', event 0",
        ),
        (first_event(action=["alloc"]), "Run pip install --upgrade torchmem."),
        (first_event(size=0), "event 0 of device 0 has an invalid size, address or stream"),
        (first_event(size=-5), "has an invalid size, address or stream"),
        (first_event(size=True), "has an invalid size, address or stream"),
        (first_event(size=1 << 64), "has an invalid size, address or stream"),
        (first_event(addr=1.5), "has an invalid size, address or stream"),
        (first_event(addr=(1 << 63) - 1), "has an invalid size, address or stream"),
        (first_event(stream=None), "has an invalid size, address or stream"),
        (first_event(pool_id=(0, "x")), "event 0 has an invalid pool"),
        (first_event(action="oom"), "event 0 of device 0 has an invalid device_free"),
        (first_segment(device=128), "segment 0 has an invalid device"),
        (first_segment(total_size=1 << 40), "the blocks of segment 0 do not fill it"),
        (first_segment(segment_type="huge"), "segment 0 is neither small nor large"),
        (first_segment(segment_pool_id=[0, 0]), "segment 0 has an invalid pool"),
        (first_segment(blocks={}), "the block list of segment 0 is not a list"),
        (first_block(state="lost"), "block 0 of segment 0 has an unknown state"),
        (first_block(address=5), "does not follow the one before it"),
        (first_block(requested_size="9"), "block 0 of segment 0 has an invalid requested_size"),
        (first_block(history=5), "the history of block 0 of segment 0 is not a list"),
        (first_block(history=[5]), "the history of block 0 of segment 0 is not a dict"),
        (lambda s: s.update(external_annotations=[5]), "annotation 0 is not a dict"),
    ],
)
def test_a_snapshot_that_cannot_be_replayed_is_one_sentence(
    job: RecordedJob, path: Path, change: Change, sentence: str
) -> None:
    """The sentence names the file, what is missing or invalid, and what to do."""
    snapshot = copy.deepcopy(job.snapshot())
    change(snapshot)

    with pytest.raises(UsageError) as refused:
        read(write(snapshot, path))

    assert str(refused.value).startswith(f"{path} ")
    assert sentence in str(refused.value)
    assert str(refused.value).isprintable()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty. To record a snapshot, call torch.cuda.memory._record_memory_history"),
        (b"\x80", "ends too early"),
        (pickle.dumps([{"total_size": 5}]), "has segments but no trace of allocations"),
        (pickle.dumps("a note"), NOT_AS_WRITTEN),
        (
            b"<html>memory_viz</html>",
            "is an HTML page, not a memory snapshot: open it in a browser",
        ),
        (b"\x80\x04\xff.", "is not a memory snapshot of PyTorch"),
        (
            gzip.compress(b"snapshot", mtime=0),
            "is compressed with gzip, not a memory snapshot: run `gunzip ",
        ),
        (zipped(), "is a zip archive, as torch.save writes it, not a memory snapshot: "),
        (
            pickle.dumps(random.Random),
            "refers to code (random.Random), which no memory snapshot does",
        ),
    ],
)
def test_a_foreign_file_is_one_sentence(path: Path, content: bytes, sentence: str) -> None:
    """The error distinguishes other formats from damaged snapshots, where possible."""
    path.write_bytes(content)

    with pytest.raises(UsageError) as refused:
        read(path)

    assert sentence in str(refused.value)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(reading.MAX_FILE_BYTES + 1)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "does not exist"),
        (Path.mkdir, "is a directory: name a file"),
        (make_fifo, "is not a regular file"),
        (make_large, "is larger than 16 GiB"),
        (lambda path: path.symlink_to(path), "is not a regular file"),
    ],
)
def test_a_path_that_cannot_be_read_is_one_sentence(
    path: Path, make: Callable[[Path], object], sentence: str
) -> None:
    """The command does not block and reads nothing large."""
    make(path)

    with pytest.raises(UsageError, match=sentence):
        read(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_one_sentence(job: RecordedJob, path: Path) -> None:
    """The sentence gives the reason."""
    write(job.snapshot(), path).chmod(0)

    with pytest.raises(UsageError, match="Permission denied"):
        read(path)


def test_a_link_is_followed(job: RecordedJob, path: Path, tmp_path: Path) -> None:
    """A link to a snapshot is read like the snapshot."""
    link = tmp_path / "latest.pickle"
    link.symlink_to(write(job.snapshot(), path))

    assert len(job.trace) == len(read(link)[0].events)


class Calls:
    """An object whose pickle is a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def frame(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


DEEP = 2_000_000
MALICIOUS = {
    "memo index of 4 billion": frame(b"Nr\xff\xff\xff\xff"),
    "a string of 8 EiB": frame(b"\x8d" + struct.pack("<Q", (1 << 63) - 1)),
    "bytes of 900 GB": frame(b"\x8e" + struct.pack("<Q", 900 << 30) + b"x"),
    "a bytearray of 900 GB": b"\x80\x05\x96" + struct.pack("<Q", 900 << 30) + b"x.",
    "an integer of 2 GiB": frame(b"\x8b" + struct.pack("<i", (1 << 31) - 1) + b"\x01"),
    "an integer of minus 5 bytes": frame(b"\x8b" + struct.pack("<i", -5)),
    "a frame of 8 EiB": b"\x80\x04\x95" + struct.pack("<Q", (1 << 63) - 1) + b"N.",
    "deep lists": frame(b"]" * DEEP + b"a" * (DEEP - 1)),
    "a deep tuple as a key": frame(b"}" + b")" + b"\x85" * DEEP + b"Ns"),
    "a deep tuple in a set": frame(b"\x8f(" + b")" + b"\x85" * DEEP + b"\x90"),
    "a list in itself": frame(b"}\x8c\x08segments]\x94h\x00as\x8c\x0ddevice_tracesh\x00s"),
    "a dict in itself": frame(b"}\x94\x8c\x08segmentsh\x00s\x8c\x0ddevice_traces]s"),
    "20,000 times the same million events": frame(
        b"}\x8c\x08segments]s\x8c\x0ddevice_traces]("
        b"](" + b"}" * 1_000_000 + b"e\x94" + b"h\x00" * 20_000 + b"es"
    ),
    "100 times the same million events": frame(
        b"}\x8c\x08segments]s\x8c\x0ddevice_traces]("
        b"](" + b"}" * 1_000_000 + b"e\x94" + b"h\x00" * 100 + b"es"
    ),
    "9 times the same million events": frame(
        b"}\x8c\x08segments]s\x8c\x0ddevice_traces]("
        b"](" + b"}" * 1_000_000 + b"e\x94" + b"h\x00" * 8 + b"es"
    ),
    "a code extension": frame(b"\x82\x01"),
    "a persistent object": frame(b"Pperson\n"),
    "an out-of-band buffer": b"\x80\x05\x97.",
    "a class by its name": frame(b"cos\nsystem\n(Vtouch pwned\ntR"),
    "a class from the stack": frame(b"\x8c\x02os\x8c\x06system\x93\x8c\x0btouch pwned\x85R"),
    "an instance": frame(b"(Vtouch pwned\nios\nsystem\n"),
    "state of a dict": frame(b"}}b"),
    "an empty stack": frame(b"0"),
    "no end": b"\x80\x04" + b"N" * 100_000,
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_pickle_is_rejected(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Attempts to run code or to exhaust memory, time or the stack end in one sentence."""
    monkeypatch.chdir(path.parent)
    path.write_bytes(MALICIOUS[name])

    with pytest.raises(UsageError, match=r"^.*[.]$"):
        read(path)

    assert [path] == list(path.parent.iterdir())


def test_code_in_a_snapshot_never_runs(job: RecordedJob, path: Path) -> None:
    """A snapshot with a call among its frames is rejected, and the call is not made."""
    marker = path.parent / "pwned"
    snapshot = copy.deepcopy(job.snapshot())
    snapshot["device_traces"][0][5]["frames"] = [Calls(os.mkdir, str(marker))]

    with pytest.raises(UsageError, match="refers to code"):
        read(write(snapshot, path))

    assert not marker.exists()


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Bound the memory as the worker does, for tests that call its parts in this process."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


VALID = pickle.dumps(varying_lengths(steps=2).snapshot())
DAMAGE = st.lists(
    st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 2), st.binary(min_size=1, max_size=4)),
    max_size=6,
)


def damaged(damage: list[tuple[int, int, bytes]], end: int) -> bytes:
    """Return VALID with bytes overwritten, removed or inserted, and cut at `end`."""
    data = bytearray(VALID)
    for place, kind, new in damage:
        data[place : place + (len(new) if kind < 2 else 0)] = b"" if kind == 1 else new
    return bytes(data[:end])


@pytest.mark.usefixtures("bounded_memory")
@settings(max_examples=2000)
@given(DAMAGE, st.integers(0, len(VALID) + 24) | st.just(len(VALID) + 24))
def test_a_damaged_snapshot_is_rejected_or_read(
    damage: list[tuple[int, int, bytes]], end: int
) -> None:
    """Each of 2,000 damaged snapshots is rejected or read; no other error is raised."""
    try:
        data = damaged(damage, end)
        check(load(io.BytesIO(data)), len(data))
    except InvalidSnapshotError as error:
        sentence = str(error)
    except MemoryError:
        return
    else:
        return
    assert sentence.endswith(".")


@settings(max_examples=60)
@given(damage=DAMAGE, end=st.integers(0, len(VALID) + 24) | st.just(len(VALID) + 24))
def test_a_damaged_file_is_rejected_or_read(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int, bytes]], end: int
) -> None:
    """Each of 60 damaged files is one sentence or a recording."""
    path = tmp_path_factory.mktemp("damaged") / "snapshot.pickle"
    path.write_bytes(damaged(damage, end))
    with suppress(UsageError):
        assert read(path)


@pytest.mark.parametrize("name", REAL_GPUS)
def test_snapshots_of_real_gpus_are_read(name: str, tmp_path: Path) -> None:
    """Each entry of a recorded trace is an event, and the segments are complete."""
    path = of_real_gpu(name, tmp_path)
    (recording,) = read(path)
    with path.open("rb") as file:
        snapshot: Any = load(file)

    assert [(e["action"], e["addr"], e["size"]) for e in snapshot["device_traces"][0]] == [
        (e.action, e.address, e.size) for e in recording.events
    ]
    assert len(snapshot["segments"]) == len(recording.segments)
    assert recording.truncated is (False if name == "small" else None)
