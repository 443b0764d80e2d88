"""What is advised where tensors need the memory is true of the case."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reports import (
    BY_NAME,
    CAPACITY,
    EVALUATION,
    FIRST_STEP,
    FORWARD,
    LONG_BATCH,
    PENDING,
    reports,
)

from torchmem.allocator.tensor_groups import TensorGroup
from torchmem.explain.call_stack import CallStack, Frame, Origin
from torchmem.explain.headline import headline
from torchmem.explain.lines import Lines, LineUse
from torchmem.explain.oom_report import OomReport
from torchmem.explain.remedies import remedies
from torchmem.explain.remedy import Remedy
from torchmem.explain.verdict import Gain, OnsetEvidence, Verdict
from torchmem.sample.sample import Steps

GIB = 1 << 30
TORCH = "/opt/venv/lib/python3.12/site-packages/torch"
OWN = Frame("/home/ann/gpt/train.py", 31, "main")
OF_TRAINING = re.compile(
    r"gradient|optimizer|backward|shard|utils\.checkpoint|losses|activations|retained|no_grad",
    re.IGNORECASE,
)
SERVING = {"kv_cache"}
"""Remedies for engines, which speak of the activations of inference."""


def _words(found: Iterable[Remedy]) -> str:
    return "\n".join("\n".join((each.text, *each.lines)) for each in found)


def _with(report: OomReport, **components: int) -> OomReport:
    sizes = {name: size * GIB for name, size in components.items()}
    return replace(report, device=replace(report.device, components=sizes))


def _called(*frames: tuple[str, str]) -> Origin:
    inner = (Frame(f"{TORCH}/{file}", 9, function, "torch") for file, function in frames)
    return Origin(CallStack((*inner, OWN)))


OPTIMIZER = ("optim/optimizer.py", "Optimizer.profile_hook_step.<locals>.wrapper")
STEP = ("optim/adamw.py", "AdamW.step")
FOREACH = _called(("optim/adam.py", "_multi_tensor_adam"), STEP, OPTIMIZER)
LOADING = _called(("serialization.py", "_load"), ("serialization.py", "load"))


@pytest.mark.parametrize("enabled", [True, False, None])
def test_no_grad_is_advised_only_where_gradients_were_enabled(enabled: bool | None) -> None:
    """An evaluation that already records no graphs needs smaller batches."""
    first = remedies(replace(EVALUATION, gradients_enabled=enabled))[0]

    assert ("no_grad" in _words([first])) == (enabled is True)
    assert ("smaller batches" in first.text) == (enabled is not True)
    assert first.gain_bytes == 5 * GIB


def test_an_evaluation_accumulates_no_gradients() -> None:
    """What is new is the evaluation, so nothing that changes the training is advised."""
    for enabled in (True, False):
        report = _with(replace(EVALUATION, gradients_enabled=enabled), step=60, parameters=10)
        assert not re.search(r"accumulate|backward", _words(remedies(report)))


@pytest.mark.parametrize("phase", ["save_checkpoint()", "deepcopy()", "export"])
def test_a_copy_goes_to_host_memory(phase: str) -> None:
    """Neither gradients nor batches matter to what saves or copies a model."""
    why = OnsetEvidence("new_phase", 5 * GIB, phase=phase)
    first = remedies(replace(EVALUATION, verdict=Verdict("capacity", None, why)))[0]

    assert "host memory" in first.text
    assert "no_grad" not in _words([first])


@given(reports | st.sampled_from(list(BY_NAME.values())))
def test_inference_hears_nothing_of_training(report: OomReport) -> None:
    """Without gradients and a trace of training, whatever happened and whatever grew."""
    verdict = report.verdict or Verdict("capacity", None, None)
    if verdict.why is not None:
        verdict = replace(verdict, why=replace(verdict.why, component="held"))
    report = replace(
        _with(report, parameters=20, held=40),
        gradients_enabled=False,
        origin=FORWARD,
        verdict=verdict,
    )

    advice = [remedy for remedy in remedies(report) if remedy.kind not in SERVING]
    assert OF_TRAINING.findall(_words(advice)) == []


def test_requests_that_record_graphs_in_vain() -> None:
    """Without steps, an onset and a trace of training, gradients may be a mistake."""
    report = replace(CAPACITY, origin=FORWARD, gradients_enabled=True, steps=Steps())

    assert "no_grad" in _words(remedies(report)[:1])
    assert "no_grad" not in _words(remedies(replace(report, gradients_enabled=None)))
    assert "no_grad" not in _words(remedies(replace(report, steps=Steps(20))))


@pytest.mark.parametrize(
    ("components", "first", "shards"),
    [
        ({"held": 57, "parameters": 1, "step": 19}, "belong neither", False),
        ({"kv_cache": 57, "parameters": 1, "step": 19}, "57.00 GiB", False),
        ({"parameters": 15, "gradients": 15, "optimizer_state": 30, "step": 17}, "Shard", True),
        ({"parameters": 8, "optimizer_state": 16, "step": 53}, "smaller batch", True),
        ({"parameters": 2, "optimizer_state": 4, "step": 71}, "smaller batch", False),
    ],
)
def test_the_tensors_that_hold_most_come_first(
    components: dict[str, int], first: str, shards: bool
) -> None:
    """Sharding helps only where parameters, gradients and optimizer state hold memory."""
    found = remedies(_with(CAPACITY, **components))

    assert first in found[0].text
    assert any("Shard" in each.text for each in found) == shards


def test_a_rank_that_runs_is_judged_by_its_peak() -> None:
    """What was read between two steps has no activations."""
    sizes = {"held": 20 * GIB, "parameters": GIB}
    device = replace(CAPACITY.device, components=sizes, component_peaks=sizes | {"step": 50 * GIB})

    assert "smaller batch" in remedies(replace(CAPACITY, device=device))[0].text


@pytest.mark.parametrize(("in_python", "first"), [(70, "belong neither"), (5, "smaller batch")])
def test_in_a_first_step_the_tensors_tell_what_was_kept(in_python: int, first: str) -> None:
    """Before a step has ended, `held` has the activations too, which are no Python objects."""
    report = replace(
        _with(FIRST_STEP, held=72, parameters=5),
        trend=replace(FIRST_STEP.trend, steps=(0,) * 30),
        tensors=(TensorGroup(9, (4, 4), "float32", in_python * GIB),),
    )

    assert first in remedies(report)[0].text


PARAMETERS = TensorGroup(8, (4, 4), "float32", 60 * GIB, "parameter")


@pytest.mark.parametrize(
    ("tensors", "first"),
    [
        ((PARAMETERS,), "Shard parameters"),
        # Gradients and copies have the shapes of parameters, and belong to the model.
        ((replace(PARAMETERS, bytes=20 * GIB), replace(PARAMETERS, role=None)), "Shard"),
        ((TensorGroup(112, (9, 4), "float32", 60 * GIB, "output"),), "Find what keeps them"),
        ((TensorGroup(4, (9, 4), "float32", 60 * GIB, "output"),), "smaller batch"),
        ((TensorGroup(20, (9, 4), "uint8", 60 * GIB),), "such as a batch, a dataset"),
        ((replace(PARAMETERS, bytes=GIB),), "smaller batch"),
    ],
)
def test_without_components_the_tensors_tell_what_to_reduce(
    tensors: tuple[TensorGroup, ...], first: str
) -> None:
    """Before a step has ended, what Python refers to is told apart by its role."""
    report = replace(_with(FIRST_STEP), tensors=tensors, gradients_enabled=True)

    assert first in remedies(report)[0].text


def test_kept_outputs_of_inference_are_no_losses() -> None:
    """Outputs that an earlier call recorded graphs for, at a request of inference."""
    kept = TensorGroup(112, (9, 4), "float32", 60 * GIB, "output")
    report = replace(_with(FIRST_STEP), tensors=(kept,), origin=FORWARD, gradients_enabled=False)
    words = _words(remedies(report))

    assert "a list of outputs" in words
    assert OF_TRAINING.findall(words) == []


def test_parameters_alone_are_a_model_that_does_not_fit() -> None:
    """A step that never began is not blamed."""
    report = replace(_with(FIRST_STEP), tensors=(replace(PARAMETERS, bytes=78 * GIB),))

    assert headline(report).startswith("The model does not fit")
    assert not headline(replace(report, tensors=())).startswith("The model")
    half = replace(PARAMETERS, bytes=39 * GIB)
    with_gradients = replace(report, tensors=(half, replace(half, role=None)))
    assert not headline(with_gradients).startswith("The model")


def test_a_checkpoint_is_read_into_host_memory() -> None:
    """If torch.load asks for the memory, or a line keeps what it has read beside the model."""
    line = 'torch.load(path, map_location="cpu")'
    asks = remedies(replace(FIRST_STEP, origin=LOADING))[0]
    held = Lines((LineUse(OWN, 30 * GIB, 200, loads=True),), 0, 0)
    keeps = remedies(replace(_with(FIRST_STEP, held=40, parameters=37), lines=held))[0]
    is_model = remedies(replace(_with(FIRST_STEP, held=7, parameters=70), lines=held))

    assert asks.lines == keeps.lines == (line,)
    assert "train.py:31" in keeps.text
    assert "30.00 GiB" in keeps.text
    assert line not in _words(is_model)


@pytest.mark.parametrize("report", [CAPACITY, FIRST_STEP, LONG_BATCH])
def test_an_optimizers_step_is_not_made_smaller_by_the_batch(report: OomReport) -> None:
    """Its copies of all parameters are avoided; activations have been freed by then."""
    at_once = remedies(replace(report, origin=FOREACH, gradients_enabled=False))
    one_by_one = remedies(replace(report, origin=_called(STEP, OPTIMIZER)))

    assert "foreach=False" in _words(at_once[:1])
    assert "foreach" not in _words(one_by_one)
    assert not re.search(r"batch|activations", _words([*at_once, *one_by_one]))


def test_waiting_comes_before_bounding() -> None:
    """The block was free a moment later; only where memory grows is that not enough."""
    gains = (Gain("waiting", GIB, None, matters=True),)

    def told(why: OnsetEvidence) -> tuple[Remedy, ...]:
        return remedies(replace(PENDING, verdict=Verdict("pending", None, why, gains)))

    once = told(OnsetEvidence("larger_step", 9 * GIB))
    assert "repeat the call" in once[0].text
    assert once[1].lines == ("torch.cuda.current_stream().wait_stream(other)",)
    assert "Bound" in once[2].text
    assert "keeps tensors" in told(OnsetEvidence("leak", 9 * GIB, 1e6, 3))[0].text


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_nothing_is_called_useless_without_proof(name: str) -> None:
    """A report alone does not show what would not have helped."""
    assert "not have helped" not in _words(remedies(BY_NAME[name]))
