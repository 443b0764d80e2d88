"""The node exporter: reads the run directory and NVML, joins them and serves Prometheus metrics."""
