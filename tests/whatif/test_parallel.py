"""Calls in forked processes give what the same calls here give."""

from __future__ import annotations

import os
from functools import partial

import pytest

from torchmem.whatif.parallel import in_processes


def test_results_come_in_the_order_of_the_calls() -> None:
    """Every call is made once, whatever process makes it."""
    assert list(in_processes([partial(pow, number, 2) for number in range(9)])) == [
        number * number for number in range(9)
    ]


def test_a_process_that_dies_costs_no_result() -> None:
    """What a killed process did not return is computed here."""
    here = os.getpid()

    def call(number: int) -> int:
        if number == 2 and os.getpid() != here:
            os._exit(9)
        return number

    assert list(in_processes([partial(call, number) for number in range(5)])) == [0, 1, 2, 3, 4]


def test_an_error_is_raised_here() -> None:
    """A call that raises in another process raises in this one."""

    def fail() -> int:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        list(in_processes([fail, fail]))
