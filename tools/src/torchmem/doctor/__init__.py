"""`torchmem doctor`: whether everything between a training process and Prometheus is in order."""
