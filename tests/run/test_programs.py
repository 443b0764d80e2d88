"""How the runs of programs from outside are compared."""

from __future__ import annotations

from experiments.monitored_runs import Outcome, Published, differences, published
from experiments.programs.__main__ import compared
from experiments.programs.results import Result
from experiments.programs.table import PROGRAMS

PAGE = """
torchmem_process_state{pid="7",run="gpt",state="running"} 0
torchmem_process_state{pid="7",run="gpt",state="exited"} 1
torchmem_process_state{pid="8",run="gpt",state="failed"} 1
torchmem_steps_total{pid="7",run="gpt"} 12
torchmem_allocated_peak_bytes{pid="7",run="gpt",gpu="0"} 1024
torchmem_allocated_peak_bytes{pid="7",run="gpt",gpu="1"} 1024
"""


def test_numbers_and_the_order_of_lines_do_not_count() -> None:
    """Losses, times, ids and who prints first may differ; words and exit codes may not."""
    plain = Outcome(0, ["rank 0 loss 2.31", "rank 1 of k7f2 in /tmp/tmpabc_defg/w done"], [])
    same = Outcome(0, ["rank 1 of x1q9 in /tmp/tmpzzzyyyxx/w done", "rank 0 loss nan"], [])
    other = Outcome(1, plain.lines[1:], ["Traceback"])

    assert list(differences(plain, same)) == []
    assert list(differences(plain, other)) == [
        "exit code 0, then 1",
        "stdout: - rank N loss N",
        "stderr: + Traceback",
    ]


def test_lines_that_change_without_torchmem_are_left_out() -> None:
    """What differs between two plain runs says nothing about torchmem."""
    plain = [Outcome(0, ["a", "sometimes"], []), Outcome(0, ["a"], ["warned"])]

    assert compared(plain, Outcome(0, ["a"], [])) == []
    assert compared(plain, Outcome(0, ["a", "torchmem"], [])) == ["stdout: + torchmem"]


def test_what_the_exporter_shows_of_each_process() -> None:
    """Its steps, its peak over all GPUs, how it ended and the name of its run."""
    assert published(PAGE) == [
        Published(12, 2048, "exited", "gpt"),
        Published(None, None, "failed", "gpt"),
    ]


def test_steps_are_right_or_absent() -> None:
    """Each rank that counts steps counts those of a rank; one that counts none is not wrong."""

    def wrong(*counted: int | None) -> list[str]:
        ranks: list[dict[str, object]] = [{"steps": steps} for steps in counted]
        return Result("a", steps=[8, 8], ranks={"torchmem run": ranks}).wrong_steps

    assert wrong(8, 8) == wrong(8, None) == wrong(0) == []
    assert wrong(8, 9) == wrong(8, 8, 8) == ["torchmem run"]


def test_the_core_is_ten_programs() -> None:
    """It is what CI could run; names differ, so that results are kept apart."""
    assert sum(program.is_core for program in PROGRAMS) == 10
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS) >= 50
