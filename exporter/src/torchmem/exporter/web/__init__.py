"""Serving HTTP to strangers: limits, TLS, passwords, and the web configuration file that Prometheus exporters share."""
