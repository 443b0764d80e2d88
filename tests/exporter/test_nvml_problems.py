"""The words for the reasons why NVML does not respond."""

from __future__ import annotations

import pytest

from torchmem.exporter.nvml import NVML_DOWN, OPEN_FAILED
from torchmem.exporter.nvml_problems import PROBLEMS, nvml_problem

REASONS = {
    *NVML_DOWN.values(),
    *OPEN_FAILED.values(),
    "timeout",
    "unexpected_error",
    "pynvml_not_installed",
}


def test_every_reason_has_words() -> None:
    """Each reason that the exporter gives has a sentence and what to do."""
    assert set(PROBLEMS) == REASONS


@pytest.mark.parametrize("reason", sorted({*REASONS, "nvml_error_42"}))
def test_the_words_are_sentences(reason: str) -> None:
    """Also a reason that this version does not know gets a sentence, which names it."""
    problem = nvml_problem(reason)

    assert problem.text.endswith(".")
    assert problem.step
    assert reason in PROBLEMS or reason in problem.text
