"""The flags for a baseline, of `torchmem preflight` and, with a prefix, of the pytest plugin.

It imports nothing, because pytest loads it in every run.
"""

BASELINE_FLAGS = (
    (
        "save-baseline",
        "FILE",
        "write what is used to a JSON file to be reviewed like a lock file",
    ),
    (
        "baseline",
        "FILE",
        "compare with such a file, and fail with what changed if more is used",
    ),
    (
        "tolerance",
        "PERCENT",
        "growth of a peak that is accepted, such as 2%% (default: 1%%)",
    ),
    (
        "markdown",
        "FILE",
        "write the comparison for the comment of a pull request",
    ),
)
"""Name, placeholder of the value, and help."""
