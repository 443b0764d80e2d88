"""Judges, by the history of the run, what grows on each device."""

from __future__ import annotations

import time
from collections.abc import Callable

from torchmem.explain.growth import live_growth, room_left
from torchmem.sample.run_history import Growth, RunHistory
from torchmem.sdk.draft import Draft
from torchmem.sdk.part import Part
from torchmem.sdk.reading.device import DeviceRecord
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.cost import GROWTH_BUDGET, INTERVAL_SECONDS, Cadence
from torchmem.sdk.safety.errors import Stage


class GrowthJudge(Part):
    """Keeps the newest judgment of each device; when the run `is_over`, of the whole run."""

    stage: Stage = "stats"

    def __init__(
        self,
        recorder: Recorder,
        interval: float = INTERVAL_SECONDS,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._recorder = recorder
        self._is_over = is_over
        self._cadence = Cadence(interval, GROWTH_BUDGET)
        self._judged: dict[int, RunHistory] = {}
        self._growth: dict[int, Growth | None] = {}

    def at_tick(self) -> None:
        """Judge if a judgment is due."""
        now = time.perf_counter()
        if self._cadence.is_due(now):
            self.judge()
            ended = time.perf_counter()
            self._cadence.record(ended, ended - now)

    def judge(self) -> None:
        """Judge each device, unless nothing was added to its history since."""
        for index, record in self._recorder.records().items():
            history = record.run_history.published()
            if history is not None and history is not self._judged.get(index):
                self._judged[index] = history
                self._growth[index] = _growth(record, history)

    def judged(self, device: int) -> Growth | None:
        """Return the newest judgment of one device."""
        return self._growth.get(device)

    def complete(self, sample: Draft) -> None:
        """Add what grows."""
        if self._is_over():
            self.judge()
        for device in sample.devices:
            if growth := self._growth.get(device.index):
                device.add(growth=growth)


def _growth(record: DeviceRecord, history: RunHistory) -> Growth | None:
    sample = record.bare_sample()
    return live_growth(history, sample.total_bytes, room_left(sample))
