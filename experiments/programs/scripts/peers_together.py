"""Train beside several tools that measure memory or energy, all in one process."""

import io
from contextlib import redirect_stdout

import torch
from codecarbon import OfflineEmissionsTracker
from nvitop import ResourceMetricCollector
from pytorch_memlab import LineProfiler, MemReporter
from stormlog import MemoryTracker
from torch.profiler import profile
from training import train

torch.zeros(1, device="cuda")
torch.cuda.memory._record_memory_history(max_entries=1000)
energy = OfflineEmissionsTracker(country_iso_code="FRA", log_level="critical")
tracker = MemoryTracker(sampling_interval=0.1)
energy.start()
tracker.start_tracking()
with ResourceMetricCollector(interval=0.5)(tag="train") as collector, profile(profile_memory=True):
    with LineProfiler(train):
        steps = train()
    print("metrics", bool(collector.collect()))
tracker.stop_tracking()
energy.stop()
with redirect_stdout(io.StringIO()):
    MemReporter().report()
snapshot = torch.cuda.memory._snapshot()
print("events", bool(tracker.get_events()), "entries", bool(snapshot["device_traces"][0]))
print("true steps", steps)
