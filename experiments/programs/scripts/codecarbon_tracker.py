"""Train while codecarbon measures energy, offline."""

from codecarbon import OfflineEmissionsTracker
from training import train

tracker = OfflineEmissionsTracker(country_iso_code="FRA", log_level="critical")
tracker.start()
steps = train()
tracker.stop()
print("true steps", steps)
