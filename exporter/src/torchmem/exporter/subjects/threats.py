"""What threatens each living rank first, with the thresholds of the exporter."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from torchmem.explain.threat_series import Judgment, judgment, threat_families
from torchmem.explain.thresholds import Limits, Thresholds
from torchmem.exporter.gpus import GpuIdentity
from torchmem.node.published import Published
from torchmem.sample.sample import LIVE_STATES, DeviceSample, Sample

_Devices = tuple[DeviceSample, ...]
_Judged = tuple[_Devices, tuple[Judgment | None, ...]]
"""The devices of a sample, and the judgment on each of them."""


class RankThreats:
    """Judges the devices of each sample once. For one thread at a time."""

    def __init__(
        self, judge: Callable[[Sample, DeviceSample, Limits], Judgment | None] = judgment
    ) -> None:
        self._judge = judge
        self._known: dict[int, _Judged] = {}
        self._thresholds: Thresholds | None = None

    def families(
        self,
        published: Sequence[Published],
        gpus: Mapping[str, GpuIdentity],
        thresholds: Thresholds,
    ) -> Iterator[Metric]:
        """Yield the series of the ranks that live; `gpus`: by UUID, also those of MIG devices."""
        if thresholds is not self._thresholds:
            self._known, self._thresholds = {}, thresholds
        live = [item for item in published if item.state in LIVE_STATES]
        judged = [self._judged(item.sample, thresholds) for item in live]
        # Devices that are kept here have an id of their own.
        self._known = {id(devices): (devices, found) for devices, found in judged}
        indices = {uuid: str(gpu.index) for uuid, gpu in gpus.items()}
        rows = (
            (labels, one)
            for item, (_, found) in zip(live, judged, strict=True)
            for (labels, _), one in zip(item.view(indices).devices(), found, strict=True)
        )
        yield from threat_families([(labels, one) for labels, one in rows if one])

    def _judged(self, sample: Sample, thresholds: Thresholds) -> _Judged:
        known = self._known.get(id(sample.devices))
        if known:
            return known
        limits = thresholds.limits(sample.process.run, platform.node())
        found = tuple(self._judge(sample, device, limits) for device in sample.devices)
        return sample.devices, found
