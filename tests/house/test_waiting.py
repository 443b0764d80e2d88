"""What runs in a training process waits by nothing that gevent or eventlet replaces."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("sample", "metrics", "host", "allocator", "explain", "sdk", "integrations")
REPLACED = {
    "threading": {"Thread", "Lock", "RLock", "Event", "Condition", "Semaphore", "Timer"}
    | {"Barrier", "enumerate", "current_thread"},
    "_thread": {"start_new_thread", "allocate_lock", "RLock"},
    "time": {"sleep"},
    "select": {"select", "poll", "epoll"},
    "socket": {"getaddrinfo", "create_connection", "gethostbyname", "getfqdn"},
    "subprocess": {"Popen", "run", "call", "check_call", "check_output"},
    "queue": {"Queue", "SimpleQueue", "LifoQueue", "PriorityQueue"},
}
ALLOWED = {
    "sdk/release/neighbors.py: time.sleep": "wait_for_memory() waits where the script asks for it",
    "sample/native_threads.py: _thread.start_new_thread": "an unpatched copy of the module",
    "sample/native_threads.py: _thread.allocate_lock": "an unpatched copy of the module",
    "sample/native_threads.py: _thread.RLock": "an unpatched copy of the module",
    "sdk/publish/endpoint.py: select.poll": "an unpatched copy of the module",
}


def used(tree: ast.Module) -> Iterator[str]:
    """Yield the functions that a file uses of REPLACED, as module.name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in REPLACED.get(node.value.id, set()):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in REPLACED:
            names = {alias.name for alias in node.names} & REPLACED[node.module]
            yield from (f"{node.module}.{name}" for name in names)


def test_nothing_waits_by_what_is_replaced(root: Path) -> None:
    """Each use has its reason here; all others are `torchmem.sample.native_threads`'."""
    found = {
        f"{room}/{path.relative_to(folder)}: {use}"
        for room in ROOMS
        for folder in root.glob(f"*/src/torchmem/{room}")
        for path in folder.rglob("*.py")
        for use in used(ast.parse(path.read_text()))
    }
    assert found == set(ALLOWED)
