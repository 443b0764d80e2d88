"""Users of one node who do not trust each other: none of them costs another one a sample."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.exposition import Exposition, scrape
from support.publishing import own_process, own_sample
from support.users import as_user, needs_root

from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.budgets import (
    MAX_PAGE_BYTES_PER_FILE_BYTE,
    MAX_PAGE_BYTES_PER_USER,
    NODE_SHARES,
    PageShare,
)
from torchmem.exporter.collect import Exporter
from torchmem.exporter.sample_files import MAX_USERS, RunDirectory, decode
from torchmem.sample.run_directory import SAMPLE_SUFFIX, sample_name
from torchmem.sample.sample import Process, Sample, encode
from torchmem.sdk.publish.sample_file import SampleFile, make_user_directory

pytestmark = needs_root

VICTIM, ATTACKER, EXPORTER = 61001, 61002, 61009
REJECTED = "torchmem_exporter_rejected_samples_total"
GONE = Process(pid=4_000_000, pid_namespace=None, start_ticks=1, hostname="h", run="night", rank=0)


def publish(run_dir: Path, sample: Sample) -> Path:
    """Publish as the SDK does, as the current user."""
    process = sample.process
    name = sample_name(process.pid, process.pid_namespace, process.start_ticks)
    file = SampleFile(make_user_directory(run_dir), name)
    file.write(sample)
    return file.path


def publish_as(user: int, run_dir: Path, sample: Sample | None = None) -> Path:
    """Publish as the SDK does, as another user; by default a rank that has ended."""
    sample = sample or own_sample(process=GONE, ended="exited")
    return as_user(user, lambda: publish(run_dir, sample))


def read(run_dir: Path) -> Exposition:
    """Scrape a new exporter."""
    return scrape(Exporter(FakeNvml.of(), RunDirectory(run_dir)))


def steps(sample: Sample, count: int) -> Sample:
    """Return the sample with another number of steps."""
    return replace(sample, steps=replace(sample.steps, count=count))


def test_the_exporter_needs_no_privileges(shared_dir: Path) -> None:
    """The user of the exporter reads through its group what other users cannot."""
    path = publish_as(VICTIM, shared_dir)

    def count() -> int:
        return len(RunDirectory(shared_dir).read(time.time()))

    def is_visible() -> bool:
        return os.access(path, os.R_OK)

    assert as_user(EXPORTER, count) == 1
    assert not as_user(ATTACKER, is_visible)


def squat_file(path: Path) -> None:
    """Take the name with a file."""
    path.write_text("mine")


def squat_directory(path: Path) -> None:
    """Take the name with a directory to which everybody may write."""
    path.mkdir()
    path.chmod(0o777)


def squat_link(path: Path) -> None:
    """Take the name with a link to a directory to which everybody may write."""
    target = path.with_name(str(ATTACKER))
    squat_directory(target)
    path.symlink_to(target)


@pytest.mark.parametrize("squat", [squat_file, squat_directory, squat_link])
def test_a_squatted_name_costs_nothing(shared_dir: Path, squat: Callable[[Path], None]) -> None:
    """Whoever takes the name of a user's directory, the user's ranks are exported."""
    as_user(ATTACKER, lambda: squat(shared_dir / str(VICTIM)))
    path = publish_as(VICTIM, shared_dir)

    assert VICTIM == path.stat().st_uid == path.parent.stat().st_uid
    assert read(shared_dir).value("torchmem_process_state", run="night", state="exited") == 1.0


def test_a_directory_open_to_others_is_not_read(shared_dir: Path) -> None:
    """What another user could have put into a directory is not exported, and counted."""
    path = publish_as(VICTIM, shared_dir)
    path.parent.chmod(0o777)
    metrics = read(shared_dir)

    assert metrics.matching("torchmem_process_state") == {}
    assert metrics.value(REJECTED, reason="unsafe_directory") == 1.0


def test_nobody_writes_for_another_user(shared_dir: Path) -> None:
    """A file in a user's directory that belongs to another user is not read."""
    path = publish_as(VICTIM, shared_dir)
    os.chown(path, ATTACKER, ATTACKER)

    assert read(shared_dir).value(REJECTED, reason="foreign_owner") == 1.0


def junk(run_dir: Path) -> None:
    """Write 30,000 names of every form to the run directory."""
    for number in range(19_000):
        (run_dir / f"0-{number}-1{SAMPLE_SUFFIX}").touch()
    for number in range(10_000):
        (run_dir / str(number)).touch()
    for number in range(1000):
        (run_dir / f"{ATTACKER}-{number:016x}").mkdir()


def test_many_names_hide_no_rank(shared_dir: Path) -> None:
    """Thousands of names of another user hide nothing, and show in the counters."""
    publish_as(VICTIM, shared_dir)
    as_user(ATTACKER, lambda: junk(shared_dir))
    metrics = read(shared_dir)

    assert metrics.value("torchmem_process_state", run="night", state="exited") == 1.0
    assert (metrics.value(REJECTED, reason="too_many") or 0.0) > 0.0
    assert (metrics.value(REJECTED, reason="unsafe_directory") or 0.0) > 0.0


def huge(number: int) -> Sample:
    """Return a sample whose series are as many and as long as a file can make them."""
    device = own_sample().devices[0]
    devices = tuple(
        replace(
            device,
            index=index,
            uuid=f"{index:02}" + "\\" * 198,
            phase_peaks=dict.fromkeys(map(chr, range(40, 91)), 1),
        )
        for index in range(52)
    )
    return own_sample(process=replace(GONE, rank=number, run='"' * 200), devices=devices)


def test_the_page_of_a_small_file_is_bounded() -> None:
    """No file gives more of the page than the bound by which small users are not measured."""
    content = encode(huge(0))
    assert PageShare.of(decode(content), 1).bytes < MAX_PAGE_BYTES_PER_FILE_BYTE * len(content)


def test_a_huge_page_costs_only_its_author(shared_dir: Path) -> None:
    """The page is bounded whatever one user writes, and other users' ranks are complete on it."""
    publish_as(VICTIM, shared_dir)

    def flood() -> None:
        directory = make_user_directory(shared_dir)
        for number in range(12):
            content = encode(huge(number))
            (directory / f"{number}{SAMPLE_SUFFIX}").write_bytes(content)

    as_user(ATTACKER, flood)
    exporter = Exporter(FakeNvml.of(), RunDirectory(shared_dir))
    metrics = scrape(exporter)
    size = sum(
        len(sample.name) + sum(map(len, sample.labels.values()))
        for family in exporter.collect()
        for sample in family.samples
    )

    assert metrics.value("torchmem_process_state", run="night", state="exited") == 1.0
    assert (metrics.value(REJECTED, reason="over_budget") or 0.0) > 0.0
    assert size < 2 * MAX_PAGE_BYTES_PER_USER


def test_nobody_rewrites_the_last_words_of_a_rank(shared_dir: Path) -> None:
    """Another user who claims a dead rank's identity changes neither its values nor its labels."""
    ended = steps(own_sample(process=GONE, ended="oom"), 10)
    publish_as(VICTIM, shared_dir, ended)
    exporter = Exporter(FakeNvml.of(), RunDirectory(shared_dir))
    before = scrape(exporter).series["torchmem_steps_total"]
    publish_as(ATTACKER, shared_dir, steps(replace(ended, ended="exited"), 99))
    after = scrape(exporter).series["torchmem_steps_total"]

    assert set(after.values()) == {10.0, 99.0}
    assert before.items() <= after.items()
    assert set(read(shared_dir).series["torchmem_steps_total"].values()) == {10.0, 99.0}


def test_users_of_many_ids_cost_the_others_nothing(tmp_path: Path) -> None:
    """Those who are on the page stay on it, however many user ids appear later."""
    sample = encode(own_sample(process=GONE, ended="exited"))

    def appear(user: int) -> None:
        folder = tmp_path / "run" / str(user)
        folder.mkdir(parents=True)
        (folder / f"1{SAMPLE_SUFFIX}").write_bytes(sample)
        for path in (folder, folder / f"1{SAMPLE_SUFFIX}"):
            os.chown(path, user, user)

    appear(VICTIM)
    directory = RunDirectory(tmp_path / "run")
    first = directory.read(time.time())
    for user in range(100_000, 100_000 + MAX_USERS + 5):
        appear(user)

    published = directory.read(time.time())
    assert first[0] in published
    assert directory.rejections["too_many"] == 6


def test_two_containers_with_equal_labels_are_both_shown(shared_dir: Path) -> None:
    """Two ranks of one user that have pid 1 in different pid namespaces are two series."""
    container = replace(GONE, pid=1, pid_namespace=4026539991)
    for namespace in (4026539991, 4026539992):
        process = replace(container, pid_namespace=namespace)
        publish_as(VICTIM, shared_dir, own_sample(process=process, ended="exited"))

    pids = read(shared_dir).by("pid", "torchmem_process_state", state="exited")
    assert len(pids) == 2
    assert "1" in pids


def test_the_owner_of_a_rejected_file_is_logged_once(
    shared_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first rejected file of each user and reason is logged with its name and owner."""

    def squat_three() -> None:
        for name in range(3):
            (shared_dir / str(name)).touch()

    as_user(ATTACKER, squat_three)
    directory = RunDirectory(shared_dir)
    for _ in range(2):
        directory.read(time.time())

    assert directory.rejections["unsafe_directory"] == 3
    assert [f"of user {ATTACKER}: unsafe_directory" in text for text in caplog.messages] == [True]


def test_a_rank_of_its_own_user_is_joined(shared_dir: Path) -> None:
    """A live process of a user is attributed, and a stranger cannot claim it."""
    mine = own_sample(process=own_process())
    publish(shared_dir, mine)
    publish_as(ATTACKER, shared_dir, steps(mine, 99))
    (item,) = RunDirectory(shared_dir).read(time.time())

    assert item.attributed
    assert mine.steps.count == item.sample.steps.count


def test_the_node_has_a_budget_too() -> None:
    """All users together are bounded, at a multiple of one user's budget."""
    assert NODE_SHARES * MAX_PAGE_BYTES_PER_USER <= 32 << 20


def become_root_of_a_user_namespace() -> None:
    """Enter a user namespace in which this user is root, as rootless containers do."""
    libc = ctypes.CDLL(None, use_errno=True)
    ids = os.getuid(), os.getgid()
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: setuid took /proc/self from this user
    if libc.unshare(0x10000000) != 0:  # CLONE_NEWUSER
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {ids[0]} 1")
    Path("/proc/self/gid_map").write_text(f"0 {ids[1]} 1")


def test_a_rank_in_a_user_namespace_is_exported(shared_dir: Path) -> None:
    """A container whose root is an ordinary user of the host publishes as that user."""

    def train() -> bool:
        try:
            become_root_of_a_user_namespace()
        except OSError:
            return False
        publish(shared_dir, own_sample(process=GONE, ended="exited"))
        return True

    if not as_user(VICTIM, train):
        pytest.skip("this machine allows no user namespaces")
    (folder,) = shared_dir.iterdir()

    assert (folder.name, folder.stat().st_uid) == ("0", VICTIM)
    assert read(shared_dir).value("torchmem_process_state", run="night", state="exited") == 1.0
