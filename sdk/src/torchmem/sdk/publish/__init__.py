"""What others see of this process: its sample file, endpoint, textfile, OTLP, and map."""
