"""The exporter of a node: reads the run directory and NVML, and serves Prometheus metrics."""
