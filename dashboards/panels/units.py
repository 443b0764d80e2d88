"""Grafana's units, by what they measure here."""

from grafana_foundation_sdk.models import units

BYTES = units.BytesIEC
BYTES_PER_SECOND = units.BytesPerSecondIEC
RATIO = units.PercentUnit
SECONDS = units.Seconds
COUNT = units.Short
NUMBER = units.NoUnit
PER_MINUTE = units.CountsPerMinute
AGO = units.DateTimeFromNow
WATTS = units.Watt
CELSIUS = units.Celsius
HERTZ = units.Hertz
