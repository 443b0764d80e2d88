"""The plugin of vLLM: opt-in, and it never keeps an engine from starting."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from torchmem.integrations import vllm_plugin
from torchmem.run import autostart

VLLMS = "vllm.v1.worker.gpu_worker.Worker"


class Wrapper:
    """What vLLM has in each process of an engine: it creates the worker of the configuration."""

    rpc_rank = 0

    def init_worker(self, all_kwargs: list[dict[str, Any]]) -> str:
        worker: str = all_kwargs[self.rpc_rank]["vllm_config"].parallel_config.worker_cls
        return worker


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    """vLLM's module with a fresh class of the wrapper."""
    fresh = type("WorkerWrapperBase", (Wrapper,), {"init_worker": Wrapper.init_worker})
    base = ModuleType("vllm.v1.worker.worker_base")
    base.WorkerWrapperBase = fresh  # type: ignore[attr-defined]
    package = ModuleType("vllm.v1.worker")
    package.worker_base = base  # type: ignore[attr-defined]
    modules = {"vllm": ModuleType("vllm"), "vllm.v1": ModuleType("vllm.v1")}
    for name, module in {**modules, package.__name__: package, base.__name__: base}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fresh


def chosen(wrapper: type[Wrapper], worker_cls: str = VLLMS) -> str:
    """Return the class of the worker that vLLM creates."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=worker_cls))
    return wrapper().init_worker([{"vllm_config": config}])


def test_it_acts_only_with_the_variable(
    wrapper: type[Wrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TORCHMEM=1, vLLM has its own worker; with it, torchmem's, however often it loads."""
    assert (vllm_plugin.VARIABLE, vllm_plugin.ON) == (autostart.VARIABLE, autostart.ON)
    monkeypatch.delenv("TORCHMEM", raising=False)
    monkeypatch.setattr(vllm_plugin, "_has_session", lambda: False)
    vllm_plugin.register()
    assert chosen(wrapper) == VLLMS

    monkeypatch.setenv("TORCHMEM", "1")
    vllm_plugin.register()
    once = wrapper.init_worker
    vllm_plugin.register()
    assert wrapper.init_worker is once
    assert chosen(wrapper) == "torchmem.integrations.vllm.Worker"


def test_another_worker_stays(wrapper: type[Wrapper], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of another class, and a configuration of another form, are left alone."""
    monkeypatch.setenv("TORCHMEM", "1")
    vllm_plugin.register()

    assert chosen(wrapper, "mine.Worker") == "mine.Worker"
    with pytest.raises(KeyError):  # vLLM's own
        wrapper().init_worker([{}])
