"""Train in a test."""

from training import train


def test_training(capfd):
    assert train() == 8
