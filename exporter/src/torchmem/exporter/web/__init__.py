"""Serving HTTP to untrusted clients: limits, TLS, passwords and the web configuration file."""
