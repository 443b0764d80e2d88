"""`torchmem doctor`: each thing that can be wrong is found, with the next step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.hostile_answers import DEEP, variants
from support.needs import needs
from support.publishing import own_sample, publish
from support.stack import free_port, prometheus
from support.waiting import until

from torchmem.cli.http import HttpAnswer, fetch
from torchmem.cli.main import main
from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.doctor import gpus, node, servers, software
from torchmem.doctor.check import Check, Place
from torchmem.doctor.check_list import WIDTH, page
from torchmem.exporter.binding import OutdatedBinding
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuFault, GpuIdentity, Versions
from torchmem.exporter.nvml import NvmlDownError
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import serve
from torchmem.sample.sample import Steps

GPU = FakeGpu(GpuIdentity(0, "GPU-1", "H100", "00000000:01:00.0", "580.1"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return a place with an empty run directory and no servers."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o1777)
    return Place({}, f"http://127.0.0.1:{free_port()}", run_dir=run_dir)


@pytest.fixture
def exporter(place: Place) -> Iterator[Place]:
    """Run a real exporter; return the place with its address."""
    assert place.run_dir is not None
    collected = Exporter(FakeNvml(lambda: [GPU]), RunDirectory(place.run_dir))
    with closing(collected), closing(serve(collected, "127.0.0.1", 0)) as server:
        yield replace(place, exporter=server.url)


def by_subject(checks: Iterator[Check]) -> dict[str, Check]:
    """Return the checks by subject."""
    return {check.subject: check for check in checks}


def problems(checks: Iterator[Check]) -> dict[str, str]:
    """Return what was found by every check that found a problem; each has a next step."""
    found = [check for check in checks if check.status == "problem"]
    assert all(check.next_step for check in found)
    return {check.subject: check.found for check in found}


def installed(**versions: str) -> Callable[[str], str | None]:
    """Return a list of installed distributions."""
    return {"torchmem": "1.0", **versions}.get


@pytest.mark.parametrize(
    ("torch", "environment", "words"),
    [
        ("2.0.1", {}, "older than 2.1"),
        ("2.8.0", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "from 2.10 on"),
        ("2.13.0", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:1"}, "rejects it"),
        ("2.13.0", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segment:True"}, "did you mean"),
    ],
)
def test_versions_and_settings_that_do_not_work_are_problems(
    torch: str, environment: Mapping[str, str], words: str
) -> None:
    """An old PyTorch, and a setting that it rejects or does not read, are found."""
    [found] = problems(software.checks(environment, installed(torch=torch))).values()

    assert words in found


@pytest.mark.parametrize("torch", ["2.13.0+cu130", "2.13.0+cpu", None])
def test_other_software_is_no_problem(torch: str | None) -> None:
    """A build for the CPU, no PyTorch, and a valid setting are not problems."""
    versions = {"torch": torch} if torch else {}
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

    assert problems(software.checks(environment, installed(**versions))) == {}


def test_missing_packages_are_named() -> None:
    """Without the extra, the missing packages and the command to install them are shown."""
    checks = software.checks({}, installed(), lambda name: name != "msgspec")
    check = by_subject(checks)["torchmem"]

    assert "msgspec" in check.found
    assert "pip install 'torchmem[exporter]'" in (check.next_step or "")


@pytest.mark.parametrize("kind", ["x86_64 Kernel Module", "Open Kernel Module for x86_64"])
def test_the_driver_has_its_version(kind: str, tmp_path: Path, place: Place) -> None:
    """The version is that of the kernel module, of both the proprietary and the open kind."""
    version = tmp_path / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    version.write_text(f"NVRM version: NVIDIA UNIX {kind}  580.159.04  Release Build  (builder)")
    checks = by_subject(gpus.checks(replace(place, proc=tmp_path), lambda: None))

    assert checks["NVIDIA driver"].found == "580.159.04"


def test_a_machine_without_a_gpu_is_no_problem(tmp_path: Path, place: Place) -> None:
    """No driver and no NVML are notes; NVML that does not respond beside a driver is a problem."""

    def down() -> list[FakeGpu]:
        raise NvmlDownError("driver_library_version_mismatch")

    without = replace(place, proc=tmp_path / "proc")
    version = tmp_path / "proc" / "driver" / "nvidia" / "version"

    assert problems(gpus.checks(without, lambda: FakeNvml(down))) == {}
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 20")
    checks = by_subject(gpus.checks(without, lambda: FakeNvml(down)))
    assert checks["NVIDIA driver"].found == "580.65.06"
    assert (
        checks["NVML"].status,
        "reboot" in (checks["NVML"].next_step or ""),
    ) == ("problem", True)


def test_every_gpu_is_listed(place: Place) -> None:
    """A GPU that responds is in order; a lost one is a problem with NVML's return code."""
    nvml = FakeNvml(lambda: [GPU, GpuFault(1, 15)], Versions("580.1", "13.580", "13.0"))
    checks = by_subject(gpus.checks(place, lambda: nvml))

    assert (checks["GPU 0"].status, checks["GPU 0"].found) == ("ok", "H100, GPU-1")
    assert (checks["GPU 1"].status, "15" in checks["GPU 1"].found) == ("problem", True)
    assert "580.1" in checks["NVML"].found


def test_a_usable_run_directory_is_in_order(place: Place) -> None:
    """With mode 1777 nothing is wrong, and this user's processes are counted."""
    assert place.run_dir is not None
    publish(place.run_dir, own_sample(settings_ignored={}))
    checks = by_subject(node.checks(place))

    assert problems(iter(checks.values())) == {}
    assert checks["processes"].found == "1 running; runs: night"


def test_settings_of_running_processes_are_shown(place: Place) -> None:
    """The settings in effect are listed, and one that PyTorch ignored is a problem."""
    assert place.run_dir is not None
    settings = {"backend": "native", "expandable_segments": "False"}
    sample = own_sample(
        allocator_settings=settings, settings_ignored={"expandable_segments": True, "x": False}
    )
    publish(place.run_dir, sample)
    checks = by_subject(node.checks(place))

    in_force = "backend=native, expandable_segments=False (1 process)"
    assert in_force == checks["settings in effect"].found
    ignored = {"settings ignored": "expandable_segments has no effect in night"}
    assert ignored == problems(iter(checks.values()))


def test_a_process_without_a_counted_step_is_a_note(place: Place) -> None:
    """It says how to count; where steps are counted, nothing is said of them."""
    assert place.run_dir is not None
    publish(place.run_dir, own_sample(settings_ignored={}))
    assert "steps" not in by_subject(node.checks(place))
    publish(place.run_dir, own_sample(settings_ignored={}, steps=Steps()))
    check = by_subject(node.checks(place))["steps"]

    assert (check.status, check.found) == ("note", "none counted in night")
    assert "session.step()" in (check.next_step or "")


def test_a_sample_that_is_not_valid_costs_only_its_settings(place: Place) -> None:
    """A malformed sample beside a valid one hides neither the process nor the other checks."""
    assert place.run_dir is not None
    path = publish(place.run_dir, own_sample(settings_ignored={}))
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"devices": "none"}))
    checks = by_subject(node.checks(place))

    assert checks["processes"].found == "1 running; runs: night"
    assert "settings in effect" not in checks


def test_a_run_directory_that_cannot_work_is_a_problem(place: Place) -> None:
    """A mode in which users can remove each other's files, and a file in its place, are found."""
    assert place.run_dir is not None
    place.run_dir.chmod(0o777)
    assert "every user can remove" in problems(node.checks(place))["run directory"]
    place.run_dir.rmdir()
    assert problems(node.checks(place)) == {}
    place.run_dir.write_text("")
    assert "is not a directory" in problems(node.checks(place))["run directory"]


def test_an_exporter_that_answers_is_in_order(exporter: Place) -> None:
    """The version and the number of processes of a running exporter are shown."""
    assert exporter.run_dir is not None
    publish(exporter.run_dir, own_sample())
    checks = by_subject(servers.checks(exporter))

    assert problems(iter(checks.values())) == {}
    assert checks["exporter"].found.endswith("1 processes")
    assert checks["clock of exporter"].status == "ok"


def test_an_exporter_with_another_run_directory_is_a_problem(
    exporter: Place, tmp_path: Path
) -> None:
    """An exporter of this machine that shows none of the running processes is found."""
    publish(tmp_path / "other", own_sample())
    elsewhere = replace(exporter, run_dir=tmp_path / "other")

    assert "shows none of the processes" in problems(servers.checks(elsewhere))["its run directory"]


def test_what_the_exporter_refuses_is_a_problem(exporter: Place) -> None:
    """Rejected samples are counted by reason."""
    assert exporter.run_dir is not None
    publish(exporter.run_dir, b"{")

    found = until(lambda: problems(servers.checks(exporter)))
    assert found == {"rejected samples": "1 malformed"}


def test_a_server_that_is_none_of_ours_is_a_problem(place: Place) -> None:
    """No answer, another program on the port, and a page that is not text are found."""
    assert "does not respond" in problems(servers.checks(place))["exporter"]
    for body in (b"<html>", b"go_goroutines 7\n", b"\xff\x00"):
        answer = HttpAnswer(200, 0.0, body)
        found = problems(servers.checks(place, {f"{place.exporter}/metrics": answer}.__getitem__))
        assert "instead of torchmem's metrics" in found["exporter"]
    prometheus = HttpAnswer(200, 0.0, b'go_goroutines 7\nprometheus_build_info{version="3"} 1\n')
    (check, *_) = servers.checks(place, {f"{place.exporter}/metrics": prometheus}.__getitem__)
    assert check.found == f"{place.exporter} is Prometheus"
    assert f"--prometheus {place.exporter}" in (check.next_step or "")
    odd = replace(place, exporter="file:///etc/passwd")
    assert "does not start with http" in problems(servers.checks(odd))["exporter"]


def test_credentials_are_sent_and_never_printed(place: Place) -> None:
    """A password in an address is not in the output."""
    secret = replace(place, exporter="http://me:secret@127.0.0.1:1")

    assert "secret" not in page(list(servers.checks(secret)))


@needs("prometheus")
def test_a_prometheus_that_scrapes_the_exporter_is_in_order(
    exporter: Place, tmp_path: Path
) -> None:
    """The real Prometheus with the shipped configuration has the target and the alerts."""
    with prometheus(tmp_path, exporter.exporter.removeprefix("http://")) as server:
        asked = replace(exporter, prometheus=server.url)
        until(lambda: not problems(servers.checks(asked)))
        checks = by_subject(servers.checks(asked))

    assert checks["Prometheus"].found.endswith("scrapes 1 exporters")
    assert "alerts are loaded" in checks["alert rules"].found


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ([], "no target of the job torchmem"),
        ([{"labels": {"job": "torchmem"}, "health": "down", "lastError": "refused"}], "refused"),
    ],
)
def test_a_prometheus_without_the_exporter_is_a_problem(
    exporter: Place, targets: list[object], words: str
) -> None:
    """A missing target, and one that is down, are found."""
    body = json.dumps({"data": {"activeTargets": targets}}).encode()

    def get(url: str) -> HttpAnswer:
        return HttpAnswer(200, 0.0, body) if "/api/" in url else fetch(url)

    asked = replace(exporter, prometheus="http://prometheus:9090")
    found = problems(servers.checks(asked, get))

    assert words in found["Prometheus"]
    assert found["alert rules"] == "Prometheus has no alerts of torchmem"
    assert "clock of Prometheus" in found


@pytest.mark.parametrize("path", ["/api/v1/targets", "/api/v1/rules"], ids=["targets", "rules"])
def test_a_hostile_prometheus_is_a_problem(exporter: Place, path: str) -> None:
    """No value, number or depth in its answers ends the command with a traceback."""
    target = {"labels": {"job": "torchmem"}, "health": "up", "scrapeUrl": "x", "lastError": ""}
    group = {"name": "a", "rules": [{"name": "TorchmemOom"}]}
    valid = json.dumps({"data": {"activeTargets": [target], "groups": [group]}}).encode()
    metrics = fetch(f"{exporter.exporter}/metrics")
    asked = replace(exporter, prometheus="http://prometheus:9090")
    for body in (*variants(valid), DEEP):

        def get(url: str, body: bytes = body) -> HttpAnswer:
            if "/api/" not in url:
                return metrics
            return HttpAnswer(200, 0.0, body if path in url else valid)

        shown = page(list(servers.checks(asked, get)))
        assert all(map(str.isprintable, shown.splitlines())), shown


def test_the_command_tells_by_its_exit_code(
    exporter: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 0 without problems and 1 with one; no line is wider than the page."""
    flags = ["doctor", "--run-dir", str(exporter.run_dir)]
    assert main([*flags, "--exporter", exporter.exporter]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= WIDTH
    assert main([*flags, "--exporter", "http://127.0.0.1:1", "--json"]) == 1
    assert "problem" in {check["status"] for check in json.loads(capsys.readouterr().out)}


def test_an_outdated_binding_is_a_problem(place: Place) -> None:
    """If another package has replaced pynvml, the check names it and the commands to run."""
    outdated = OutdatedBinding("nvidia-ml-py3", "7.352.0")
    nvml = FakeNvml(lambda: [GPU], Versions("580.1", outdated_binding=outdated))
    check = by_subject(gpus.checks(place, lambda: nvml))["pynvml"]

    assert (check.status, "nvidia-ml-py3 7.352.0" in check.found) == ("problem", True)
    assert (check.next_step or "").startswith("pip uninstall --yes nvidia-ml-py3 && pip install")
