"""Train beside Stormlog's tracker."""

import time

from stormlog import MemoryTracker
from training import train

tracker = MemoryTracker(sampling_interval=0.1)
tracker.start_tracking()
steps = train()
time.sleep(0.5)
tracker.stop_tracking()
print("has events", bool(tracker.get_events()))
print("true steps", steps)
