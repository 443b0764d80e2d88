"""What threatens each living rank first, with the thresholds of the exporter."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from torchmem.explain.threat_series import Judgment, judgment, threat_families
from torchmem.explain.thresholds import Thresholds
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.sample_files import Published
from torchmem.sample.sample import LIVE_STATES, Sample

_Judged = tuple[Sample, tuple[Judgment | None, ...]]
"""A sample, and the judgment on each of its devices."""


class RankThreats:
    """Judges each sample once. For one thread at a time."""

    def __init__(self) -> None:
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
        # A sample that is kept here has an id of its own.
        self._known = {id(item.sample): self._judged(item.sample, thresholds) for item in live}
        indices = {uuid: str(gpu.index) for uuid, gpu in gpus.items()}
        found = [
            (labels, judged)
            for item in live
            for (labels, _), judged in zip(
                item.view(indices).devices(), self._known[id(item.sample)][1], strict=True
            )
            if judged
        ]
        yield from threat_families(found)

    def _judged(self, sample: Sample, thresholds: Thresholds) -> _Judged:
        known = self._known.get(id(sample))
        if known:
            return known
        limits = thresholds.limits(sample.process.run, platform.node())
        return sample, tuple(judgment(sample, device, limits) for device in sample.devices)
