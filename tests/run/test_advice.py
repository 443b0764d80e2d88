"""`torchmem run --apply-advice`: what the OOM reports of earlier attempts change, and what not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support import reports
from support.recordings import in_small_pieces, write

from torchmem.explain.headline import headline
from torchmem.explain.oom_report import OomReport, encode
from torchmem.explain.verdict import Gain, OnsetEvidence, Verdict
from torchmem.run.advice import SettingAdvice, find_advice
from torchmem.run.attempts import MAX_REPORTS
from torchmem.run.replay import Question, Replayed
from torchmem.sample.capture_messages import OOM_RECORDING_SUFFIX
from torchmem.sample.run_directory import report_name, sample_name
from torchmem.sample.sample import OomCause, OomDetail, Sample, Steps
from torchmem.sample.sample import encode as encode_sample

ADVICE = "expandable_segments:True"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHMEM_ADVICE")
SHOW = 'for name in "$@"; do printenv "$name" || echo; done'
UNCHANGED = ("", "", "")
SEGMENTS = "large_segment_size_mb:16"
DAY = 24 * 3600


class Replays:
    """Answers a replay, and keeps what was asked."""

    def __init__(self, answer: Replayed) -> None:
        self.settings: list[list[str]] = []
        self.present: list[Mapping[str, str]] = []
        self.room: list[int] = []
        self._answer = answer

    def __call__(self, _path: Path, question: Question) -> Replayed:
        """Return the answer."""
        self.present.append(question.present)
        self.settings.append(list(question.settings))
        self.room.append(question.room)
        return self._answer


def found(folder: Path, replay: Replays | None = None, **environment: str) -> SettingAdvice:
    """Return the advice for a run in this process."""
    replay = replay or Replays(Replayed(problem="none"))
    return find_advice("night", environment | {"TORCHMEM_RUN_DIR": str(folder)}, replay=replay)


def record(report: Path) -> Path:
    """Write a recording beside a report, of a job that smaller segments would have saved."""
    path = report.with_name(report.name.rpartition("-")[0] + OOM_RECORDING_SUFFIX)
    return write(in_small_pieces().snapshot(), path)


def launch(
    folder: Path, *, name: str = "night", **environment: str
) -> tuple[tuple[str, ...], list[str]]:
    """Run a command with advice; return its values of VARIABLES, and the lines on stderr."""
    flags = ["--apply-advice", "--name", name, "--run-dir", str(folder)]
    clean = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torchmem.cli",
            "run",
            *flags,
            "--",
            "sh",
            "-c",
            SHOW,
            "sh",
            *VARIABLES,
        ],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return tuple(done.stdout.splitlines()), done.stderr.splitlines()


def judged(cause: OomCause, why: OnsetEvidence, gain: Gain) -> OomReport:
    """Return the report of an OOM with this verdict."""
    detail: OomDetail | None = "stranded" if cause == "fragmentation" else None
    oom = replace(reports.STRANDED.oom, cause=cause, detail=detail, onset=why.onset)
    return replace(reports.STRANDED, oom=oom, verdict=Verdict(cause, detail, why, (gain,)))


def attempt(
    folder: Path,
    number: int,
    steps: int,
    *,
    advice: str = "",
    report: OomReport = reports.STRANDED,
    age: float = 1000,
) -> Path:
    """Write the report of an attempt that ended by an OOM `age` seconds ago; return its path."""
    process = replace(
        report.process,
        pid=number,
        start_ticks=number,
        labels={"advice": advice} if advice else {},
    )
    timestamp = time.time() - age + number
    own = replace(report, timestamp=timestamp, process=process, steps=Steps(steps))
    path = folder / str(os.geteuid()) / report_name(sample_name(number, 1, number), 1)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(encode(own))
    return path


def test_an_oom_by_fragmentation_sets_what_its_report_names(tmp_path: Path) -> None:
    """The setting and its label are in the environment of the command, and one line says so."""
    attempt(tmp_path, 1, 390)
    values, lines = launch(tmp_path)

    assert values == (ADVICE, "", ADVICE)
    (line,) = lines
    assert line == (
        "torchmem: expandable_segments:True is added to PYTORCH_ALLOC_CONF by the report's rule: "
        "the run ended after 390 steps, out of memory by fragmentation."
    )


def test_pytorch_before_2_10_gets_the_variable_that_it_reads(tmp_path: Path) -> None:
    """PyTorch 2.9 ignores PYTORCH_ALLOC_CONF without a warning."""
    process = replace(reports.STRANDED.process, versions={"torch": "2.9.1"})
    attempt(tmp_path, 1, 390, report=replace(reports.STRANDED, process=process))

    assert launch(tmp_path)[0] == ("", ADVICE, ADVICE)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_other_settings_of_the_user_stay(tmp_path: Path, variable: str) -> None:
    """The setting is added to the variable that the user set, whichever PyTorch reads first."""
    attempt(tmp_path, 1, 390)
    values, _ = launch(tmp_path, **{variable: "max_split_size_mb:128"})

    assert {name: value for name, value in zip(VARIABLES[:2], values, strict=False) if value} == {
        variable: f"max_split_size_mb:128,{ADVICE}"
    }


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_value_of_the_user_is_never_replaced(tmp_path: Path, variable: str) -> None:
    """The same key in either variable stays as it is, and one line says so."""
    attempt(tmp_path, 1, 390)
    values, lines = launch(tmp_path, **{variable: "expandable_segments:False"})

    assert set(values) == {"", "expandable_segments:False"}
    assert lines == ["torchmem: expandable_segments stays as you set it."]


@pytest.mark.parametrize("name", sorted(reports.BY_NAME))
def test_only_fragmentation_with_a_setting_first_changes_anything(
    tmp_path: Path, name: str
) -> None:
    """Other causes leave the environment alone, as do remedies that are not allocator settings."""
    report = reports.BY_NAME[name]
    attempt(tmp_path, 1, 390, report=report)
    expected = {
        "stranded": ADVICE,
        "stranded_limit": ADVICE,
        "expandable": "roundup_power2_divisions:8",
        "leak_and_stranded": ADVICE,
        "not_grown": ADVICE,
    }

    assert expected.get(name, "") == launch(tmp_path)[0][2]


@pytest.mark.parametrize(("steps", "kept"), [(100, False), (390, False), (428, False), (429, True)])
def test_advice_that_does_no_better_is_withdrawn(tmp_path: Path, steps: int, kept: bool) -> None:
    """It stays only if the attempt that had it ran for at least a tenth more steps."""
    attempt(tmp_path, 1, 390)
    attempt(tmp_path, 2, steps, advice=ADVICE)
    values, lines = launch(tmp_path)

    assert ((ADVICE, "", ADVICE) if kept else ("", "", "withdrawn")) == values
    if not kept:
        (line,) = lines
        assert line == (
            f"torchmem: {ADVICE} is not set again: the run ended after {steps} steps with it, "
            "390 steps without it."
        )


def test_advice_that_was_withdrawn_stays_so(tmp_path: Path) -> None:
    """Later attempts without it, which fail as the first did, do not bring it back."""
    attempt(tmp_path, 1, 390)
    attempt(tmp_path, 2, 100, advice=ADVICE)
    attempt(tmp_path, 3, 500, advice="withdrawn")

    assert found(tmp_path).environment == {"TORCHMEM_ADVICE": "withdrawn"}


LEAK = OnsetEvidence("leak", 70 * reports.GIB, 8 * reports.MIB, 2, "held")
LEAKS = judged("capacity", LEAK, Gain("compaction", 96 * reports.MIB, 12.0, matters=False))
BOTH = judged("fragmentation", LEAK, Gain("compaction", 9 * reports.GIB, 1152.0, matters=True))
TIGHT = judged(
    "capacity",
    OnsetEvidence("stranded", 9 * reports.GIB),
    Gain("compaction", reports.GIB, None, matters=False),
)


def test_a_leak_gets_no_setting(tmp_path: Path) -> None:
    """One line says that memory leaks, with or without a recording, which is not replayed."""
    record(attempt(tmp_path, 1, 390, report=LEAKS))
    values, lines = launch(tmp_path)
    replays = Replays(Replayed(ADVICE))
    found(tmp_path, replays)

    assert values == UNCHANGED
    assert replays.settings == []
    (line,) = lines
    assert line.startswith("torchmem: no setting is added: memory leak: tensors kept between steps")
    assert "184.74 MiB a step" in line
    assert line.endswith(", which no setting cures.")


def test_what_a_setting_gains_of_a_leak_is_said(tmp_path: Path) -> None:
    """A setting is added where it makes room for many steps, and the line says how many."""
    attempt(tmp_path, 1, 390, report=BOTH)
    advice = found(tmp_path)

    assert advice.environment["TORCHMEM_ADVICE"] == ADVICE
    assert "room for about 1,152 more" in advice.sentence


def test_only_expandable_segments_are_a_rule_where_memory_grows(tmp_path: Path) -> None:
    """Other settings do not gain what compaction would; a replay may prove one."""
    detail = replace(BOTH.oom, detail="small_segment")
    path = attempt(tmp_path, 1, 390, report=replace(BOTH, oom=detail))
    without = found(tmp_path)
    record(path)

    assert not without.environment
    assert without.sentence.startswith("no setting is added: ")
    proved = found(tmp_path, Replays(Replayed(SEGMENTS)))
    assert proved.environment["TORCHMEM_ADVICE"] == SEGMENTS


def test_a_replay_must_leave_room_where_memory_grows(tmp_path: Path) -> None:
    """It ends with the failed request, so that a tenth of the steps done must fit after it."""
    record(attempt(tmp_path, 1, 390, report=BOTH))
    asked = Replays(Replayed(failed=(ADVICE,)))
    advice = found(tmp_path, asked)

    assert asked.room == [39 * 8 * reports.MIB]
    assert not advice.environment
    assert advice.sentence.endswith("it does so too or soon after.")


def test_room_that_does_not_matter_needs_a_replay(tmp_path: Path) -> None:
    """The report's rule is not applied then; a setting that a replay has proved is."""
    path = attempt(tmp_path, 1, 390, report=TIGHT)
    without = found(tmp_path)
    record(path)

    assert not without.environment
    assert "TORCHMEM_CAPTURE_ON_OOM=trace" in without.sentence
    problem = found(tmp_path, Replays(Replayed(problem="it is damaged.")))
    assert not problem.environment
    assert problem.sentence.endswith(" it is damaged.")
    proved = found(tmp_path, Replays(Replayed(SEGMENTS)))
    assert proved.environment["TORCHMEM_ADVICE"] == SEGMENTS
    assert "by fragmentation" not in proved.sentence


@pytest.mark.parametrize("name", sorted(reports.BY_NAME))
def test_one_line_says_why_nothing_is_added(tmp_path: Path, name: str) -> None:
    """Whatever the cause, there is a line, with the verdict if no setting is added."""
    report = reports.BY_NAME[name]
    attempt(tmp_path, 1, 390, report=report)
    advice = found(tmp_path)

    assert len(advice.sentence.splitlines()) == 1
    if not advice.environment:
        ended = replace(report, steps=Steps(390))
        assert headline(ended)[1:] in advice.sentence


def test_a_leak_gets_a_setting_at_most_once(tmp_path: Path) -> None:
    """Attempts of 216, 221, 221 and 221 steps: the setting is taken back after the first of 221."""
    given = []
    for number, steps in enumerate((216, 221, 221, 221), 1):
        given.append(found(tmp_path).environment.get("TORCHMEM_ADVICE", ""))
        attempt(tmp_path, number, steps, advice=given[-1])

    assert given == ["", ADVICE, "withdrawn", "withdrawn"]


def test_a_setting_that_helps_stays_for_all_later_attempts(tmp_path: Path) -> None:
    """It is compared with the attempt that lacked it, not with the one before that had it."""
    attempt(tmp_path, 1, 100)
    for number in (2, 3, 4):
        assert found(tmp_path).environment["TORCHMEM_ADVICE"] == ADVICE
        attempt(tmp_path, number, 200, advice=ADVICE)

    assert found(tmp_path).environment["TORCHMEM_ADVICE"] == ADVICE


def test_steps_that_were_not_counted_decide_as_none(tmp_path: Path) -> None:
    """A job without an optimizer has no steps to compare, so the setting is tried once."""
    attempt(tmp_path, 1, 0)
    attempt(tmp_path, 2, 0, advice=ADVICE)

    assert found(tmp_path).environment["TORCHMEM_ADVICE"] == "withdrawn"


def test_a_launcher_within_another_leaves_its_advice(tmp_path: Path) -> None:
    """What the outer `torchmem run` has added is not taken for the user's."""
    attempt(tmp_path, 1, 390)

    assert found(tmp_path, TORCHMEM_ADVICE=ADVICE, PYTORCH_ALLOC_CONF=ADVICE).sentence == ""


def test_the_empty_variable_that_pytorch_reads_first(tmp_path: Path) -> None:
    """PYTORCH_CUDA_ALLOC_CONF that is set to nothing hides the others, so it gets the setting."""
    attempt(tmp_path, 1, 390)

    assert launch(tmp_path, PYTORCH_CUDA_ALLOC_CONF="")[0] == ("", ADVICE, ADVICE)
    # Observed with PyTorch 2.13 of CUDA: it reads the variable of ROCm builds before the new one.
    changed = found(tmp_path, PYTORCH_HIP_ALLOC_CONF="max_split_size_mb:128").environment
    assert changed["PYTORCH_HIP_ALLOC_CONF"] == f"max_split_size_mb:128,{ADVICE}"


@pytest.mark.parametrize(("age", "counts"), [(29 * DAY, True), (31 * DAY, False), (-DAY, True)])
def test_reports_count_for_thirty_days(tmp_path: Path, age: float, counts: bool) -> None:
    """Older ones end; a clock that was some time ahead does no harm."""
    attempt(tmp_path, 1, 390, age=age)

    assert counts == bool(found(tmp_path).environment)


def test_a_clock_that_was_far_ahead_decides_nothing(tmp_path: Path) -> None:
    """A report of next year is not the newest one for a year."""
    attempt(tmp_path, 1, 390)
    attempt(tmp_path, 2, 100, age=-365 * DAY, report=reports.BY_NAME["capacity"])

    assert ADVICE in found(tmp_path).sentence


def test_more_reports_than_the_sdk_keeps_are_not_read(tmp_path: Path) -> None:
    """Of any number of files in the directory, only the newest count."""
    oldest = attempt(tmp_path, 1, 390)
    os.utime(oldest, (1, 1))
    for number in range(2, 2 + MAX_REPORTS):
        attempt(tmp_path, number, 390, report=replace(reports.STRANDED, survived=True))

    assert not found(tmp_path).sentence


def test_a_recording_decides_instead_of_the_rule(tmp_path: Path) -> None:
    """Its replay finds the setting that suffices, and the line says that it was replayed."""
    record(attempt(tmp_path, 1, 390))
    values, lines = launch(tmp_path)

    assert values == (SEGMENTS, "", SEGMENTS)
    (line,) = lines
    assert line == (
        f"torchmem: {SEGMENTS} is added to PYTORCH_ALLOC_CONF by replay: the run ended after 390 "
        f"steps, out of memory by fragmentation; replayed with {SEGMENTS}, memory suffices."
    )


def test_nothing_is_set_if_no_replay_suffices(tmp_path: Path) -> None:
    """The report's rule is not applied if its replay runs out of memory too."""
    record(attempt(tmp_path, 1, 1))
    advice = found(tmp_path, replay=Replays(Replayed(failed=(ADVICE, SEGMENTS))))

    assert not advice.environment
    assert advice.sentence == (
        "no setting is added: the run ended after 1 step, out of memory by fragmentation; replayed "
        "with each of 2 settings, it does so too."
    )


def test_the_rule_decides_if_the_replay_shows_nothing(tmp_path: Path) -> None:
    """The line says why, for example that the replay took too long."""
    record(attempt(tmp_path, 1, 390))
    advice = found(tmp_path, replay=Replays(Replayed(problem="it is damaged.")))

    assert advice.environment["TORCHMEM_ADVICE"] == ADVICE
    assert "by the report's rule" in advice.sentence
    assert advice.sentence.endswith("The recording does not show more: it is damaged.")


def test_a_setting_that_an_older_pytorch_lacks_is_left_out(tmp_path: Path) -> None:
    """A job whose PyTorch was replaced by an older one since must still start."""
    record(attempt(tmp_path, 1, 390))
    asked = Replays(Replayed(problem="it is damaged."))
    for torch in ("2.10.1", "2.11.0", None):
        find_advice("night", {"TORCHMEM_RUN_DIR": str(tmp_path)}, torch, asked)

    versions = replace(reports.STRANDED.process, versions={"torch": "2.10.0"})
    record(attempt(tmp_path, 2, 390, report=replace(reports.STRANDED, process=versions)))
    find_advice("night", {"TORCHMEM_RUN_DIR": str(tmp_path)}, "2.13.0", asked)

    assert [SEGMENTS in settings for settings in asked.settings] == [False, True, True, False]


def test_what_is_replayed(tmp_path: Path) -> None:
    """The rule comes first; what the user has set, did not help, or is unknown here is left out."""
    process = replace(reports.STRANDED.process, versions={"torch": "2.10.0"})
    older = replace(reports.STRANDED, process=process)
    asked = Replays(Replayed(problem="it is damaged."))
    record(attempt(tmp_path, 1, 390, report=older))
    found(tmp_path, replay=asked)
    found(tmp_path, replay=asked, PYTORCH_ALLOC_CONF="max_split_size_mb:128")
    attempt(tmp_path, 2, 390, advice=ADVICE, report=older)
    record(attempt(tmp_path, 3, 390))
    found(tmp_path, replay=asked)
    every, without_split, later = asked.settings

    assert every[0] == ADVICE
    assert not [text for text in every if "large_segment" in text]
    assert [text for text in every if "max_split" not in text] == without_split
    assert asked.present[1] == {"max_split_size_mb": "128"}
    assert later[0] == SEGMENTS


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_only_an_own_file_is_replayed(tmp_path: Path, kind: str) -> None:
    """A link, a pipe or a directory in place of a recording is none."""
    path = attempt(tmp_path, 1, 390)
    recording = record(path)
    aside = recording.rename(tmp_path / "elsewhere")
    if kind == "link":
        recording.symlink_to(aside)
    elif kind == "pipe":
        os.mkfifo(recording)
    else:
        recording.mkdir()
    asked = Replays(Replayed(SEGMENTS))

    assert found(tmp_path, replay=asked).environment["TORCHMEM_ADVICE"] == ADVICE
    assert not asked.settings


def test_ranks_that_read_the_same_reports_agree(tmp_path: Path) -> None:
    """A second launcher beside the first one chooses the same and says the same."""
    attempt(tmp_path, 1, 390)
    attempt(tmp_path, 2, 391)

    assert launch(tmp_path) == launch(tmp_path)


def test_an_oom_that_the_script_survived_is_none(tmp_path: Path) -> None:
    """A process that caught the error and went on is not a failed attempt."""
    attempt(tmp_path, 2, 390, report=replace(reports.STRANDED, survived=True))
    path = attempt(tmp_path, 1, 390)
    sample = Sample(
        timestamp=reports.NOW,
        process=reports.STRANDED.process,
        devices=(reports.STRANDED.device,),
        ended="exited",
    )
    path.with_name(sample_name(1, 1, 1)).write_bytes(encode_sample(sample))

    assert launch(tmp_path) == (UNCHANGED, [])


def test_another_run_has_its_own_advice(tmp_path: Path) -> None:
    """Reports of a run with another name change nothing."""
    attempt(tmp_path, 1, 390)

    assert launch(tmp_path, name="day") == (UNCHANGED, [])


def test_reports_that_cannot_be_used_change_nothing(tmp_path: Path) -> None:
    """Cut-off, hostile and foreign files, and a missing directory, leave the command as it is."""
    whole = attempt(tmp_path, 1, 390)
    content = whole.read_bytes()
    whole.write_bytes(content[: len(content) // 2])
    folder = whole.parent
    os.mkfifo(folder / "1-2-2-1.oom.json")
    (folder / "1-3-3-1.oom.json").write_bytes(b"[" * 60_000)
    (folder / "1-4-4-1.oom.json").symlink_to("/dev/zero")
    foreign = tmp_path / "shared" / "report"
    foreign.parent.mkdir()
    foreign.write_bytes(content)
    (folder / "1-5-5-1.oom.json").symlink_to(foreign)

    assert launch(tmp_path) == (UNCHANGED, [])
    assert launch(tmp_path / "missing") == (UNCHANGED, [])
    assert launch(foreign) == (UNCHANGED, [])


def test_a_directory_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    """A report that another user could have put there is not read."""
    attempt(tmp_path, 1, 390).parent.chmod(0o777)

    assert launch(tmp_path) == (UNCHANGED, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_reports_of_other_users_are_nothing_to_root(tmp_path: Path) -> None:
    """Root, who can read the reports of all users, takes advice only from its own."""
    path = attempt(tmp_path, 1, 390)
    foreign = path.parent.rename(tmp_path / "4711")
    os.chown(foreign / path.name, 4711, 4711)
    os.chown(foreign, 4711, 4711)

    assert launch(tmp_path) == (UNCHANGED, [])


def test_a_run_without_a_name_is_a_usage_error() -> None:
    """Without a name there is nothing to find earlier attempts by."""
    clean = {key: value for key, value in os.environ.items() if key != "TORCHMEM_RUN"}
    done = subprocess.run(
        [sys.executable, "-m", "torchmem.cli", "run", "--apply-advice", "--", "true"],
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--name" in done.stderr
