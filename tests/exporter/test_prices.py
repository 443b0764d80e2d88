"""Prices of GPU-hours: from the setting to the series of each GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.exposition import scrape

from torchmem.cli.main import main
from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter import config
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.prices import GpuPrices
from torchmem.sample.errors import UsageError

SERIES = "torchmem_gpu_hour_price"
NODE = FakeNvml.of(
    *(
        FakeGpu(GpuIdentity(index, f"GPU-{index}", name))
        for index, name in enumerate(["NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "L4", None])
    )
)


def test_a_gpu_has_the_price_of_its_model(open_exporter: Callable[..., Exporter]) -> None:
    """The longest part of the name counts; a GPU without a price or a name has no series."""
    prices = GpuPrices({"h100": 2.5, "H100 NVL": 3.25, "A100": 1.25}, "EUR")
    exposition = scrape(open_exporter(NODE, prices=prices))

    assert exposition.by("uuid", SERIES, currency="EUR") == {"GPU-0": 2.5, "GPU-1": 3.25}
    assert exposition.value(SERIES, model="NVIDIA H100 NVL", gpu="1") == 3.25


def test_without_a_setting_there_is_no_price(open_exporter: Callable[..., Exporter]) -> None:
    """Not even the name of the series is served."""
    assert SERIES not in scrape(open_exporter(NODE)).series


def test_prices_are_in_the_file_and_flags_replace_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--print-config prints a file with the same prices."""
    file = tmp_path / "exporter.yml"
    file.write_text("gpu_hour_prices:\n  H100: 2\n  A100: 1.25\ncurrency: EUR\n")
    assert config.load(file, {}).prices == GpuPrices({"H100": 2, "A100": 1.25}, "EUR")

    flags = ("--gpu-hour-price", "H100=2.5", "--gpu-hour-price", "L4=0.5")
    assert main(["exporter", "--config", str(file), *flags, "--print-config"]) == 0
    file.write_text(capsys.readouterr().out)
    assert config.load(file, {}).prices == GpuPrices({"H100": 2.5, "L4": 0.5}, "EUR")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("gpu_hour_prices: 2", "gpu_hour_prices in .* is 2: give `key: value` lines"),
        ("gpu_hour_prices: {H100: free}", "gpu_hour_prices.H100 in .*: give a positive number"),
        ("currency: euro", "the currency 'euro' is not a currency code: use one such as USD"),
    ],
)
def test_a_price_that_is_none_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    """The error names the key and says what to write."""
    file = tmp_path / "exporter.yml"
    file.write_text(content)

    with pytest.raises(UsageError, match=expected):
        config.load(file, {})


@pytest.mark.parametrize("flag", ["H100", "=2", "H100=-1", "H100=much"])
def test_a_flag_without_model_and_price_is_refused(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with one sentence and code 2."""
    with pytest.raises(SystemExit, match="2"):
        main(["exporter", "--gpu-hour-price", flag, "--print-config"])
    assert "--gpu-hour-price" in capsys.readouterr().err
