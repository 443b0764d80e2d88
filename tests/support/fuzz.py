"""What must hold for any bytes, one check for each input that others than the user may write.

A check returns whether the input was accepted; False means that it was refused as it should be. It
raises what the caller of the code would get instead, or AssertionError if the answer is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import yaml
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from support import attacked_exporter, broken_logs, reports
from support.exposition import Exposition
from support.hostile import Documents, hostile, json_bytes, pickle_bytes
from support.maps import full_map
from support.publishing import own_sample
from support.recordings import varying_lengths
from support.samples import UUID, full_sample
from support.words import oom_text, rank_text

from torchmem.allocator.settings import AllocatorConfig, rejection_reason
from torchmem.cli.main import main
from torchmem.compare import page as compare_page
from torchmem.compare.reading import read_side
from torchmem.compare.verdict import compare
from torchmem.explain import oom_report, run_summary
from torchmem.explain.chosen_thresholds import chosen as load_thresholds
from torchmem.explain.run_summary import SUMMARY_SUFFIX, summarize
from torchmem.explain.thresholds import defaults, defaults_text
from torchmem.exporter import config
from torchmem.exporter.collect import sample_families
from torchmem.exporter.discovery import target_groups
from torchmem.exporter.live import map_file
from torchmem.exporter.process_owners import ProcessOwners
from torchmem.exporter.rejections import RejectedSampleError
from torchmem.exporter.sample_files import decode
from torchmem.exporter.scrapes import accepts_gzip, answer_seconds, choose_format
from torchmem.exporter.subjects.threats import RankThreats
from torchmem.exporter.web import config as web_config
from torchmem.exporter.web.access import credentials
from torchmem.host.procfs import start_ticks
from torchmem.node.published import Published
from torchmem.node.summaries import summaries
from torchmem.preflight.result import ProcessReport, read_result
from torchmem.sample import capture_messages, process_messages, release_messages, strict_yaml
from torchmem.sample.errors import UsageError
from torchmem.sample.memory_map import MemoryMap
from torchmem.sample.memory_map import encode as encode_map
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.sample import decode as decode_sample
from torchmem.sample.sample import encode
from torchmem.sdk.publish.request_files import RequestFile
from torchmem.sdk.release.neighbors import offering_neighbors
from torchmem.trace.checked_values import InvalidSnapshotError
from torchmem.trace.content import check
from torchmem.trace.worker import load
from torchmem.why.node_words import oom_table
from torchmem.why.ooms import of_report

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class _Families:
    def __init__(self, families: list[Metric]) -> None:
        self.collect = lambda: families


def _check_sentence(text: str) -> None:
    assert text.isprintable(), text
    assert text, "an error without a message"


def _with_file(content: bytes, read: Callable[[Path], object]) -> bool:
    """Check that reading a file succeeds, or raises UsageError with one sentence."""
    with tempfile.NamedTemporaryFile(suffix=".yml") as file:
        file.write(content)
        file.flush()
        try:
            read(Path(file.name))
        except UsageError as error:
            _check_sentence(str(error))
            return False
    return True


def settings_file(content: bytes) -> bool:
    """Check `--config`: the settings, printed as YAML, give the same settings."""

    def read(file: Path) -> None:
        settings = config.load(file, {})
        file.write_text(settings.as_yaml())
        assert settings == config.load(file, {}), settings

    return _with_file(content, read)


def web_config_file(content: bytes) -> bool:
    """Check `--web.config.file`."""
    return _with_file(content, web_config.load)


def thresholds_file(content: bytes) -> bool:
    """Check the file of `torchmem manifests rules`."""
    return _with_file(content, load_thresholds)


def yaml_file(content: bytes) -> bool:
    """Check that the strict reader has all keys that PyYAML reads."""

    def read(file: Path) -> None:
        section = strict_yaml.read(file, None)
        assert set(strict_yaml.read_plain(file)) == set(section)
        with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
            plain = yaml.safe_load(content)
            if isinstance(plain, dict) and all(isinstance(key, str) for key in plain):
                assert {key for key in plain if plain[key] is not None} <= set(section), plain

    return _with_file(content, read)


def sample_file(content: bytes) -> bool:
    """Check a sample file: it is rejected, or gives valid metrics and targets of this node."""
    try:
        sample = decode(content)
    except RejectedSampleError:
        return False
    published = [Published(sample, sample.process.pid, "running", attributed=True)]
    found = [*sample_families(published, {}), *RankThreats().families(published, {}, defaults())]
    Exposition.of_text(generate_latest(_Families(found)).decode())
    for group in target_groups(published, "node5", "10.0.0.9", {"10.0.0.5"}):
        assert group["targets"][0].rpartition(":")[0] in {"node5", "10.0.0.5"}, group
    return True


def headers(content: bytes) -> bool:
    """Check that any text is accepted as a request header."""
    text = content.decode("latin-1")
    choose_format(text)
    accepts_gzip(text)
    seconds = answer_seconds(text)
    assert seconds is None or seconds > 0
    target_groups([], text, text, ())
    return credentials(text) is not None


def oom_report_file(content: bytes) -> bool:
    """Check an OOM report: it is refused, or printed, and it survives being written again."""
    try:
        report = oom_report.decode(content)
    except UsageError as error:
        _check_sentence(str(error))
        return False
    page = oom_text(report, Path("1-2-3-0.oom.json"))
    assert page.replace("\n", "").isprintable(), page
    assert oom_table([of_report(Path("1-2-3-0.oom.json"), report)])
    assert oom_report.decode(oom_report.encode(report)) == report
    return True


def capture_message(content: bytes) -> bool:
    """Check a request to record memory history, and the answer to one."""
    return True in [_is_message(content, read) for read in _READERS[:2]]


def release_message(content: bytes) -> bool:
    """Check a request to return memory, and the answer to one."""
    return True in [_is_message(content, read) for read in _READERS[2:]]


_READERS: tuple[Callable[[bytes], DataclassInstance], ...] = (
    capture_messages.decode_request,
    capture_messages.decode_answer,
    release_messages.decode_request,
    release_messages.decode_answer,
)


def _is_message(content: bytes, read: Callable[[bytes], DataclassInstance]) -> bool:
    try:
        message = read(content)
    except ValueError as error:
        _check_sentence(str(error))
        return False
    again = read(process_messages.encode(message))
    assert repr(again) == repr(message)  # NaN is not equal to itself
    return True


def request_file(content: bytes) -> bool:
    """Check that a process grants the request in a file, or refuses it with a sentence."""
    return True in [_is_granted(content, read) for read in _READERS[::2]]


def _is_granted(content: bytes, read: Callable[[bytes], object]) -> bool:
    with tempfile.TemporaryDirectory() as name:
        sample = Path(name) / f"1-2-3{SAMPLE_SUFFIX}"
        file = RequestFile(sample, ".request", ".answer", read)
        process_messages.sibling_path(sample, ".request").write_bytes(content)
        assert file.changed()
        refused: list[str] = []
        assert (file.read(refused.append) is None) is bool(refused)
    for sentence in refused:
        _check_sentence(sentence)
    return not refused


def neighbor_sample(content: bytes) -> bool:
    """Check that a process asks another one only if its sample offers memory on that device."""
    with tempfile.TemporaryDirectory() as name:
        own = Path(name) / f"1-2-3{SAMPLE_SUFFIX}"
        own.with_name(f"4-5-6{SAMPLE_SUFFIX}").write_bytes(content)
        offering = list(offering_neighbors(own, UUID))
    assert set(offering) <= {own.with_name(f"4-5-6{SAMPLE_SUFFIX}")}
    return bool(offering)


def memory_map_file(content: bytes) -> bool:
    """Check a memory map, as it is and compressed: it is refused, or a page can draw it."""
    return any([_is_map(content), _is_map(gzip.compress(content, 1))])


def _is_map(content: bytes) -> bool:
    try:
        written = map_file.checked(content, now=1.8e9)
    except ValueError as error:
        _check_sentence(str(error))
        return False
    found = msgspec.json.decode(gzip.decompress(written), type=MemoryMap, strict=True)
    assert 0 <= found.timestamp <= 1.8e9
    for device in found.devices:
        assert device.large_page_bytes > 0
        assert device.uuid is None or device.uuid.isprintable(), device.uuid
        for segment in device.segments:
            assert len(segment.states) == len(segment.sizes) > 0
            assert set(segment.states) <= set("apfAPF")
            assert 0 < sum(segment.sizes) < 1 << 53
    assert map_file.checked(encode_map(found), now=1.8e9) == written
    return True


def snapshot(content: bytes) -> bool:
    """Check a memory snapshot as the child process reads it, which may run out of memory."""
    try:
        check(load(io.BytesIO(content)), len(content))
    except InvalidSnapshotError as error:
        _check_sentence(str(error))
        return False
    except MemoryError:
        return False
    return True


def snapshot_file(content: bytes) -> bool:
    """Check that `torchmem whatif` answers for a snapshot, or exits with 2 and one sentence."""
    shown, errors = io.StringIO(), io.StringIO()
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        file.write(content)
        file.flush()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
            code = main(
                ["whatif", file.name, *(["--gpu-model", "24GB"] if len(content) % 2 else [])]
            )
    refused = errors.getvalue().removesuffix("\n")
    assert (code == 2) == refused.startswith("torchmem: "), (code, refused)
    assert refused.isprintable(), refused
    assert shown.getvalue().replace("\n", "").isprintable(), shown.getvalue()
    return code != 2


def compared_file(content: bytes) -> bool:
    """Check a file that `torchmem compare` is given: it is refused in a sentence, or has a page."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"1-2-3{SUMMARY_SUFFIX}"
        path.write_bytes(content)
        try:
            side = read_side(path)
            found = compare(side, side, 0.02)
            compare_page.listing(summaries(Path(name), None))
        except UsageError as error:
            _check_sentence(str(error))
            return False
    assert all(map(str.isprintable, compare_page.page(found).splitlines()))
    assert found.exit_code == 0
    assert json.loads(compare_page.document(found))
    return True


def rank_report(content: bytes) -> bool:
    """Check what `torchmem why` shows of a sample file: it is refused, or has a page."""
    try:
        sample = decode_sample(content)
    except (ValueError, RecursionError):
        return False
    page = rank_text(sample, 1.8e9)
    assert all(map(str.isprintable, page.splitlines())), page
    return True


def preflight_report(content: bytes) -> bool:
    """Check the report that the script's process leaves behind, which may be damaged."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "7.report.json").write_bytes(content)
        try:
            result = read_result(Path(name), len(content) % 2, 1.0)
        except UsageError as error:
            _check_sentence(str(error))
            return False
    str(result.error)
    return True


def allocator_settings(content: bytes) -> bool:
    """Check a value of PYTORCH_CUDA_ALLOC_CONF: one sentence, or settings for the simulator."""
    text = content.decode(errors="surrogateescape")
    reason = rejection_reason(text)
    if reason is None:
        AllocatorConfig.parse(text)
    return reason is None


def process_files(content: bytes) -> bool:
    """Check that a process that chooses its own name and cgroup cannot hide or change its data."""
    comm, _, cgroup = content.partition(b"\n")
    with tempfile.TemporaryDirectory() as name:
        entry = Path(name) / "7"
        entry.mkdir()
        (entry / "comm").write_bytes(comm + b"\n")
        (entry / "cgroup").write_bytes(cgroup)
        (entry / "status").write_text("Uid:\t0\t1000\t0\t0\n")
        (entry / "stat").write_bytes(b"7 (" + comm + b") S " + b"0 " * 18 + b"4711 0 0\n")
        assert start_ticks(7, Path(name)) == 4711
        with contextlib.closing(ProcessOwners(Path(name), lambda uid: "ada")) as owners:
            labels = owners.labels(7)
    assert (labels["uid"], labels["user"]) == ("1000", "ada")
    assert all(map(str.isprintable, labels.values())), labels
    return len(labels) > 3


@dataclass(frozen=True)
class Target:
    """One input: its check, how hostile input is made, and its share of all inputs.

    `valid` are examples as bytes, `documents` as trees, `words` what a valid input is made of.
    `threads`: how many inputs are tried at once.
    """

    check: Callable[[bytes], bool]
    share: int
    words: tuple[str, ...] = ()
    documents: Callable[[], Documents | None] = lambda: None
    valid: Callable[[], list[bytes]] = list
    threads: int = 1


def _samples() -> Documents:
    return Documents([json.loads(encode(full_sample()))], json_bytes)


def _offers() -> Documents:
    tree = json.loads(encode(own_sample()))
    tree["devices"][0] |= {"uuid": UUID, "releases": {"neighbors": {"times": 1}}}
    return Documents([tree], json_bytes)


def _maps() -> Documents:
    return Documents([json.loads(gzip.decompress(encode_map(full_map())))], json_bytes)


def _reports() -> Documents:
    known = map(oom_report.encode, reports.BY_NAME.values())
    return Documents([json.loads(content) for content in known], json_bytes)


def _compared() -> Documents:
    """Return what `torchmem compare` reads as JSON: a summary, a preflight, an OOM report."""
    summary = run_summary.encode(summarize(full_sample(), "oom"))
    outcome = {
        "ended": "steps",
        "steps": 3,
        "devices": [
            dict.fromkeys(("device", "total", "headroom", "peak_allocated", "peak_reserved"), 5)
            | {"retries": 0, "uses": [{"component": "step", "bytes": 5}]}
        ],
    }
    run = {
        "schema": 1,
        "phantom": True,
        "kind": "run",
        "command": ["python"],
        "steps": 3,
        "gpu_model": {"product": "T4"},
        "alloc_conf": None,
        "outcome": outcome,
        "need": None,
        "verdict": {"fits": True, "sentence": "Fits."},
    }
    cell = {"values": {"batch": "8"}, "fits": True, "outcome": outcome}
    known = [json.loads(summary), run, run | {"kind": "matrix", "cells": [cell]}]
    return Documents([*known, *_reports().trees[:1]], json_bytes)


def _messages() -> Documents:
    asked = 1_700_000_000_000_000_000
    messages = (
        capture_messages.CaptureRequest(20.0),
        capture_messages.CaptureAnswer(asked, "refused", "it is stopped."),
        release_messages.ReleaseRequest("neighbors", 1 << 30),
        release_messages.ReleaseAnswer(asked, "done", {UUID: 5 << 20, "0": 1}, 0.25),
        release_messages.ReleaseAnswer(asked, "refused", {}, reason="it is turned off."),
    )
    return Documents([asdict(message) for message in messages], json_bytes)


def _snapshots(steps: int) -> Documents:
    small = varying_lengths(steps=steps), varying_lengths(steps=steps, gpu_bytes=1 << 29)
    return Documents([job.snapshot() for job in small], pickle_bytes)


def _preflight_reports() -> Documents:
    step = {"step": 1, "peak_allocated": 5, "peak_reserved": 6, "allocated": 4}
    device = {
        **dict.fromkeys(("device", "outside", "peak_step", "stranded", "retries", "ooms"), 0),
        "total": 80 << 30,
        "peak_allocated": 5,
        "peak_reserved": 6,
        "device_allocs": 3,
        "peak_phase": "backward",
        "phase_peaks": [["backward", 5]],
        "steps": [step] * 3,
    }
    report = ProcessReport(
        stopped=True,
        steps=3,
        out_of_memory=False,
        message="Tried to allocate 2.00 GiB",
        devices=(),
        host_bytes=1 << 30,
        values_read=2,
        torch_version="2.13.0",
    )
    return Documents([asdict(report) | {"devices": [device]}], json_bytes)


def _settings() -> Documents:
    tree = {
        "listen": "127.0.0.1:9847",
        "run_dir": "/run/torchmem",
        "ttl_seconds": 900,
        "processes_per_gpu": 8,
        "web_config_file": "web.yml",
    }
    return Documents([tree], json_bytes)


def _web_configs() -> Documents:
    tls = {"cert_file": "/dev/null", "key_file": "/dev/null", "min_version": "TLS12"}
    users = {"ada": "$2y$10$" + "a" * 53}
    tree = {
        "tls_server_config": tls | {"client_auth_type": "NoClientCert", "cipher_suites": ["x"]},
        "http_server_config": {"headers": {"X-Frame-Options": "deny"}},
        "basic_auth_users": users,
        "rate_limit": {"interval": "1m3s", "burst": 5},
    }
    return Documents([tree, {"basic_auth_users": users}], json_bytes)


def _thresholds() -> Documents:
    values = yaml.safe_load(defaults_text())
    override = {"match": {"run": "llm-.*"}, "fragmentation_ratio": 0.8}
    return Documents([values, {"overrides": [override]}], json_bytes)


def _written(documents: Callable[[], Documents]) -> Callable[[], list[bytes]]:
    """Return the documents as they are written without a change."""

    def write() -> list[bytes]:
        known, rng = documents(), random.Random(0)
        return [known.write(rng, tree) for tree in known.trees]

    return write


YAML_WORDS = (
    *["<<", "&a", "*a", "!!binary", "!!timestamp", "!!python/object:os.system", "2001-99-99"],
    *["0b_", "---", "? ", "%YAML 9", "~", "1e9", "- ", ": ", "\n  ", "true", "-1", "0o17", "5:30"],
)
HEADER_WORDS = (
    *["gzip", "q=", "0.5", "application/openmetrics-text", "version=", "1.0.0", "nan", "1e999"],
    *["Basic ", "Ojo=", "b3BzOng=", ";", ",", "*", "identity", "00-4bf92f3577b34da6a3ce-01"],
)
ALLOCATOR_WORDS = (
    *["expandable_segments", "max_split_size_mb", "max_non_split_rounding_mb", "True", "False"],
    *["large_segment_size_mb", "roundup_power2_divisions", "garbage_collection_threshold", ":"],
    *["per_process_memory_fraction", "throw_on_cudamalloc_oom", "[256:1,512:2,>:4]", ",", "0.8"],
    *["128", "20", "4", "9" * 5000, "٣", "²", "1_0", " ", "\t", "]", "[", ">", "-1", "1e3"],
)
PROCESS_WORDS = (
    *["python", ") Z 1 2", "(", ")", "Uid:\t0", "0::/kubepods.slice/kubepods-pod", "a0" * 32],
    *["docker-", ".scope", "/slurm/uid_0/job_7/", "\n", "0d5c3c0b-6bd4-4a7c-9f2f-57b2a3e0c9d1"],
)

TEXTS_FILE = Path(__file__).parents[1] / "why/texts.yml"


def _texts() -> list[bytes]:
    return [case["text"].encode() for case in yaml.safe_load(TEXTS_FILE.read_text())]


TARGETS: dict[str, Target] = {
    "sample_file": Target(sample_file, 250, (), _samples, _written(_samples)),
    "run_directory": Target(attacked_exporter.run_directory, 10),
    "http_request": Target(
        attacked_exporter.http_request,
        70,
        attacked_exporter.REQUEST_WORDS,
        valid=lambda: [attacked_exporter.REQUEST],
        threads=16,
    ),
    "headers": Target(headers, 400, HEADER_WORDS, valid=lambda: [b"Basic b3BzOng=", b"gzip;q=0.5"]),
    "rank_report": Target(rank_report, 100, (), _samples, _written(_samples)),
    "memory_map_file": Target(memory_map_file, 120, (), _maps, _written(_maps)),
    "oom_report_file": Target(oom_report_file, 120, (), _reports, _written(_reports)),
    "compared_file": Target(compared_file, 60, (), _compared, _written(_compared)),
    "capture_message": Target(capture_message, 300, (), _messages, _written(_messages)),
    "release_message": Target(release_message, 300, (), _messages, _written(_messages)),
    "request_file": Target(request_file, 100, (), _messages, _written(_messages)),
    "neighbor_sample": Target(neighbor_sample, 100, (), _offers, _written(_offers)),
    "map_requests": Target(attacked_exporter.map_requests, 20),
    "snapshot": Target(snapshot, 260, (), lambda: _snapshots(2), _written(lambda: _snapshots(2))),
    "snapshot_file": Target(snapshot_file, 2, (), lambda: _snapshots(4)),
    "preflight_report": Target(
        preflight_report, 100, (), _preflight_reports, _written(_preflight_reports)
    ),
    "allocator_settings": Target(
        allocator_settings,
        320,
        ALLOCATOR_WORDS,
        valid=lambda: [b"expandable_segments:True,max_split_size_mb:128", b"max_split_size_mb:20"],
    ),
    "process_files": Target(process_files, 80, PROCESS_WORDS),
    "settings_file": Target(settings_file, 30, YAML_WORDS, _settings, _written(_settings)),
    "web_config_file": Target(
        web_config_file, 30, YAML_WORDS, _web_configs, _written(_web_configs)
    ),
    "thresholds_file": Target(thresholds_file, 8, YAML_WORDS, _thresholds),
    "text": Target(
        broken_logs.check,
        300,
        (),
        lambda: Documents([None], broken_logs.write),
        _texts,
    ),
    "yaml_file": Target(yaml_file, 20, YAML_WORDS, _settings, _written(_settings)),
}


def make_input(seed: int, target: str, number: int) -> bytes:
    """Return hostile input, which depends only on the arguments."""
    valid, documents = _examples(target)
    rng = random.Random(f"{seed}/{target}/{number}")
    return hostile(rng, valid, TARGETS[target].words, documents)


@functools.cache
def _examples(target: str) -> tuple[list[bytes], Documents | None]:
    return TARGETS[target].valid(), TARGETS[target].documents()
