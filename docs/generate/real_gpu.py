"""docs/measurements/real-gpu.md, and its line in the index: only once a run on a GPU was kept."""

from __future__ import annotations

from pathlib import Path

from experiments.real_gpu.report import RESULTS, Report, markdown

FOLDER = Path(__file__).resolve().parents[1] / "measurements"
PAGE, INDEX = FOLDER / "real-gpu.md", FOLDER / "README.md"
LINE = "- [On a real GPU](real-gpu.md): what only a driver can show, beside the phantom GPU\n"


def rendered(results: Path = RESULTS) -> dict[Path, str]:
    """Return the page and the index; nothing without a run on a GPU.

    Raises:
        ValueError: the figures are those of a phantom.
    """
    if not results.exists():
        return {}
    report = Report.load(results)
    if report.machine.gpu is None or "(phantom)" in report.machine.gpu:
        raise ValueError(f"{results} is not of a GPU")
    index = INDEX.read_text(encoding="utf-8")
    return {
        PAGE: markdown(report) + "\n",
        INDEX: index if LINE in index else index.rstrip("\n") + "\n" + LINE,
    }
