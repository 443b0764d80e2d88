"""The hooks, options, marker and fixture of the plugin; see docs/memory-tests.md.

It imports neither torch nor torchmem's own code before a test is measured.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torchmem.compare.baseline_flags import BASELINE_FLAGS
from torchmem.pytest_plugin.marker import DEFAULT_GPU_MODEL, NAME

if TYPE_CHECKING:
    from torchmem.pytest_plugin.measured import BlockMemory
    from torchmem.pytest_plugin.session import MemorySession

MARKER = (
    "gpu_memory(peak=None, reserved=None, leak=None, gpu_model=None, world_size=None, rank=0): "
    "limit the GPU memory of a test, in bytes or as '6 GiB', with --gpu-memory"
)
_SESSION = pytest.StashKey["MemorySession"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare options and settings."""
    group = parser.getgroup("torchmem", "GPU memory of tests (torchmem)")
    group.addoption(
        "--gpu-memory",
        action="store_true",
        help="measure the GPU memory of tests that have the marker or the fixture gpu_memory: on "
        "this machine's GPU, or else on a phantom GPU",
    )
    group.addoption(
        "--gpu-memory-report", action="store_true", help="print a table of all measured tests"
    )
    group.addoption(
        "--gpu-memory-gpu-model",
        metavar="MODEL",
        help="the phantom GPU of tests that name none: see torchmem preflight --list-gpu-models "
        f"(default: {DEFAULT_GPU_MODEL})",
    )
    for name, metavar, text in BASELINE_FLAGS:
        group.addoption(f"--gpu-memory-{name}", metavar=metavar, help=text)
    parser.addini(NAME, "measure the GPU memory of tests (--gpu-memory)", "bool", default=False)
    for name in ("gpu_model", "baseline", "tolerance"):
        parser.addini(f"{NAME}_{name}", f"the default of --gpu-memory-{name.replace('_', '-')}")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and, if the plugin is switched on, what measures."""
    config.addinivalue_line("markers", MARKER)
    if config.getoption(NAME) or config.getini(NAME):
        from torchmem.pytest_plugin.session import MemorySession, options_of
        from torchmem.sample.errors import UsageError

        try:
            session = MemorySession(options_of(config), config)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        config.stash[_SESSION] = session
        config.pluginmanager.register(session, "torchmem_gpu_memory")


@pytest.fixture
def gpu_memory(request: pytest.FixtureRequest) -> GpuMemoryFixture:
    """Return what measures a block: `with gpu_memory(peak="2 GiB") as used: ...`."""
    session = request.config.stash.get(_SESSION, None)
    if session is None:
        pytest.skip("measures GPU memory: run pytest with --gpu-memory")
    return GpuMemoryFixture(session, request.node)


class GpuMemoryFixture:
    """The fixture: call it with limits, as the marker, for a context manager."""

    def __init__(self, session: MemorySession, item: pytest.Item) -> None:
        self._session = session
        self._item = item

    @property
    def is_phantom(self) -> bool:
        """Whether the test runs on a phantom GPU, which computes nothing: values are zero."""
        from torchmem.pytest_plugin.measurement import is_on_phantom

        return is_on_phantom()

    @contextmanager
    def __call__(self, **limits: Any) -> Iterator[BlockMemory]:
        """Measure a block and limit it; afterwards, what it used is in the object.

        limits: peak, reserved and leak, in bytes or as "2 GiB". Fails the test if a limit is
        exceeded. Raises UsageError for other names.
        """
        with self._session.block(self._item, limits) as used:
            yield used


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse a module that skips its measured tests because this process has no GPU."""
    report = yield
    session = collector.config.stash.get(_SESSION, None)
    if session is not None and report.skipped and session.needs_phantom:
        from torchmem.pytest_plugin.session import skipped_at_import

        problem = skipped_at_import(Path(collector.path))
        if problem:
            report.outcome, report.longrepr = "failed", problem
    return report
