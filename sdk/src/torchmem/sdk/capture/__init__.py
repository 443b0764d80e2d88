"""PyTorch's memory history: recordings on request, at an OOM, and the lines that hold memory."""
