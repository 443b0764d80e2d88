"""One colour for one thing, on every dashboard. Red is for what ended or failed, orange for what wants attention."""

NEUTRAL = "text"
ATTENTION = "orange"
FAILED = "red"

STATES = {
    "running": "green",
    "stalled": "yellow",
    "exited": "text",
    "oom": FAILED,
    "killed": ATTENTION,
}
SEVERITIES = {"critical": FAILED, "warning": ATTENTION, "info": "blue"}
CAUSES = {"capacity": "blue", "fragmentation": "orange", "limit": "purple", "external": "yellow"}

# The parts of a device, as gpu:torchmem_memory_bytes:sum names them.
PARTS = {
    "in_use": "blue",
    "stranded": "orange",
    "releasable": "light-blue",
    "private_pools": "purple",
    "cached": "super-light-blue",
    "outside_allocator": "yellow",
    "other_processes": "semi-dark-yellow",
    "driver": "dark-purple",
    "not_pytorch": "#8e8e8e",
    "free": "super-light-green",
}
