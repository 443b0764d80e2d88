"""MLflow: memory as metrics of a run.

import mlflow
from torchmem.integrations.mlflow import log_memory

with mlflow.start_run():
    log_memory()
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric

from torchmem import sdk
from torchmem.integrations.memory_log import EVERY_SECONDS, MemoryLog
from torchmem.sample.sample import Sample

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("torchmem")


def log_memory(
    run_id: str | None = None,
    every: float = EVERY_SECONDS,
    **settings: Unpack[sdk.SettingsKeywords],
) -> MemoryLog | None:
    """Log the memory of this process to an MLflow run, the active one by default.

    Logs every `every` seconds from a separate thread, at the step that the session counts. Takes
    the settings of `sdk.instrument`. Without a run it logs a warning and returns None.
    """
    session = sdk.instrument(**settings)
    active = mlflow.active_run()
    run_id = run_id or (active.info.run_id if active else None)
    if run_id is None:
        _log.warning("log_memory() logs nothing: call it after mlflow.start_run(), or pass run_id")
        return None
    client, run = MlflowClient(), run_id

    def write(scalars: dict[str, float], sample: Sample) -> None:
        moment, step = int(sample.timestamp * 1000), sample.steps.count
        metrics = [Metric(name, value, moment, step) for name, value in scalars.items()]
        client.log_batch(run, metrics=metrics)

    return MemoryLog(session, write, every)
