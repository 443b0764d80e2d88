"""A pytest plugin that measures the GPU memory of tests and limits it, also without a GPU."""
