"""What is read of every device, and what is kept of it between reads."""
