"""The memory of a device that is not the card's own: shared with the host, or limited by software.

The numbers are of public reports: a DGX Spark, an N1X, a Strix Halo, a pod of HAMi.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchmem.sdk.pytorch.device_memory import FreeMemory, shares_host_memory, total_bytes

MIB, GIB = 1 << 20, 1 << 30
SPARK = 127_600_748 << 10


class Machine:
    """A fake of torch on a machine whose /proc/meminfo can be changed."""

    def __init__(self, folder: Path, total: int, *, hip: str | None = None) -> None:
        self.folder, self.total, self.free = folder, total, 0
        cuda = SimpleNamespace(mem_get_info=lambda _: (self.free, self.total))
        self.torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip))
        self.memory = FreeMemory(self.torch, folder)

    def host(self, available: int) -> None:
        """Set what the host has available."""
        text = f"MemTotal: {SPARK >> 10} kB\nMemAvailable: {available >> 10} kB\n"
        (self.folder / "meminfo").write_text(text)

    def read(self, *, is_shared: bool) -> int:
        """Return what is free on the GPU."""
        return self.memory.read(0, self.total, is_shared=is_shared)


def test_a_large_file_takes_no_memory_of_a_gb10(tmp_path: Path) -> None:
    """CUDA's free is the kernel's MemFree, which the page cache lowers; MemAvailable counts."""
    spark = Machine(tmp_path, SPARK)
    spark.host(100 * GIB)
    spark.free = 98 * GIB
    before = spark.read(is_shared=True)

    spark.free = 2 * GIB  # after a file of 96 GiB was written

    assert before == spark.read(is_shared=True) == 100 * GIB


def test_of_an_apu_both_its_own_limit_and_the_host_must_have_it(tmp_path: Path) -> None:
    """HIP's free is what GTT leaves, and the host may have less."""
    apu = Machine(tmp_path, 94 * GIB, hip="7.2")
    apu.host(30 * GIB)
    apu.free = 80 * GIB
    assert apu.read(is_shared=True) == 30 * GIB
    apu.host(100 * GIB)
    assert apu.read(is_shared=True) == 80 * GIB


@pytest.mark.parametrize("is_shared", [True, False])
def test_more_free_than_there_is_is_clamped_with_a_hint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_shared: bool
) -> None:
    """HIP says 120 GiB free of 62 GiB on a Strix Halo: 62 GiB count, and that is logged once."""
    apu = Machine(tmp_path, 62 * GIB, hip="7.13")
    apu.host(124 * GIB)
    apu.free = 120 * GIB
    with caplog.at_level(logging.WARNING, "torchmem"):
        assert [apu.read(is_shared=is_shared) for _ in range(2)] == [62 * GIB] * 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"The driver says that {120 * GIB} bytes of a GPU of {62 * GIB} bytes")


def test_no_limit_of_a_pool_is_no_free_memory(tmp_path: Path) -> None:
    """PyTorch writes 2 to the 64 bytes for what it does not know."""
    card = Machine(tmp_path, 80 * GIB)
    assert card.memory.possible(1 << 64, card.total, is_shared=False) == 80 * GIB


def test_without_proc_cuda_is_believed(tmp_path: Path) -> None:
    """A sandbox without /proc/meminfo."""
    spark = Machine(tmp_path, SPARK)
    spark.free = 5 * GIB
    assert spark.read(is_shared=True) == 5 * GIB


def test_a_card_of_its_own_needs_no_proc(tmp_path: Path) -> None:
    """The host's memory has no say in that of a card."""
    card = Machine(tmp_path, 80 * GIB)
    card.host(GIB)
    card.free = 70 * GIB
    assert card.read(is_shared=False) == 70 * GIB


@pytest.mark.parametrize(
    ("by_properties", "by_memory_info", "expected"),
    [
        (80 * GIB, 1000 * MIB, 1000 * MIB),  # HAMi answers one of the two calls
        (1000 * MIB, 1000 * MIB, 1000 * MIB),  # or both
        (80 * GIB, 80 * GIB, 80 * GIB),
    ],
)
def test_a_software_limit_is_the_total(
    tmp_path: Path, by_properties: int, by_memory_info: int, expected: int
) -> None:
    """What the process sees of an 80 GiB card is what it can have."""
    torch = Machine(tmp_path, by_memory_info).torch
    properties = SimpleNamespace(total_memory=by_properties)
    assert total_bytes(torch, 0, properties) == expected


def test_only_an_integrated_gpu_shares_the_hosts_memory() -> None:
    """CUDA's property decides; PyTorch has always had it."""
    assert shares_host_memory(SimpleNamespace(is_integrated=1))
    assert not shares_host_memory(SimpleNamespace(is_integrated=0))
    assert not shares_host_memory(SimpleNamespace())
