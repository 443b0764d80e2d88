"""The table of private functions of PyTorch that the SDK calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torchmem.sdk
from torchmem.sdk.pytorch.private_calls import PRIVATE_CALLS

SDK = Path(str(torchmem.sdk.__file__)).parent
NAMES = {private.name.rpartition(".")[2] for private in PRIVATE_CALLS}
# The module, what is only looked for, parts of Dynamo's strategy, an address.
NOT_CALLED = {
    "_C",
    "_cuda_init",
    "_dynamo",
    "_inductor",
    "_cdata",
    "_FrameAction",
    "_FrameExecStrategy",
}


def private_names(path: Path) -> Iterator[str]:
    """Yield the private attributes of torch that a file uses, by name or through getattr."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and _is_torch(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            owner, name = node.args[:2]
            if _is_torch(owner) and isinstance(name, ast.Constant):
                yield str(name.value)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch."):
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))


def _is_torch(node: ast.expr) -> bool:
    text = ast.unparse(node)
    others = ("frames", "storage", "self._kind", "group", "backend", "distributed.distributed_c10d")
    return "torch" in text or text in others


def test_the_table_is_complete() -> None:
    """Every private function of torch that a file of the SDK uses is in the table, and no other."""
    used = {
        name
        for path in SDK.glob("**/*.py")
        for name in private_names(path)
        if name.startswith("_") and not name.startswith("__")
    }
    used |= {"DisableTorchFunction", "skip_code", "set_eval_frame", "set_code_exec_strategy"}

    assert used - NOT_CALLED == NAMES
