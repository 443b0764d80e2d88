"""The kinds of jobs, and what is true of each."""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

PROGRAMS = Path(__file__).resolve().parent / "programs"
GPU_GIB = (2, 3, 4, 6, 8, 12, 16)
GUILTY = "# guilty"

UNKNOWN = "unknown"
"""The onset where none is said."""

Effect = Literal["little", "any", "much"]
"""What expandable segments add to the steps: less than a tenth, more or less than that, or more."""
LITTLE, MUCH = 0.05, 0.2
"""Below the first share of additional steps, fragmentation was not the cause; above the second, it
was; between them, both answers are right."""
WORTH = 0.1
"""The share of additional steps that makes a setting worth its advice."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Jobs that run out of memory for one reason.

    Attributes:
        program: the file in `programs`.
        function: the function in it.
        text: what happens, in a few words.
        onsets: the onsets that are true; two if both are. UNKNOWN where no step tells it.
        causes: the causes that are true, except causes that are measured.
        expandable: the effect of expandable segments. With `any`, a measurement shows whether
            fragmentation was the cause of a job.
        ranks: the processes of a job, of which the first is looked at.
    """

    program: str
    function: str
    text: str
    onsets: frozenset[str]
    causes: frozenset[str] = frozenset({"capacity"})
    expandable: Effect = "little"
    ranks: int = 1

    @property
    def guilty(self) -> frozenset[int]:
        """The lines that allocate what is kept; empty for a kind without a guilty line."""
        return _guilty_lines(self.program, self.function)


@dataclass(frozen=True, slots=True)
class Case:
    """One job: a kind and a seed, which decide every size."""

    kind: Kind
    seed: int

    @property
    def gpu_gib(self) -> int:
        """The memory of its GPU."""
        return random.Random(f"{self.kind.function} {self.seed} GPU").choice(GPU_GIB)  # noqa: S311

    @property
    def name(self) -> str:
        """As in the results."""
        return f"{self.kind.function} {self.seed}"


@cache
def _guilty_lines(program: str, function: str) -> frozenset[int]:
    """Return the marked lines in a function, and lines elsewhere whose mark names the function."""
    text = (PROGRAMS / f"{program}.py").read_text(encoding="utf-8")
    defined = {
        node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)
    }
    node = defined[function]
    inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return frozenset(
        number
        for number, line in enumerate(text.splitlines(), 1)
        if GUILTY in line and (number in inside or line.endswith(f"{GUILTY} {function}"))
    )


def _of(*names: str) -> frozenset[str]:
    return frozenset(names)


LEAK, LARGER, NEW, FIRST = _of("leak"), _of("larger_step"), _of("new_phase"), _of("first_step")
OUTSIDE, STRANDED = _of("outside"), _of("stranded")
EITHER = _of("capacity", "fragmentation")
LIMIT, EXTERNAL, FRAGMENTATION = _of("limit"), _of("external"), _of("fragmentation")

KINDS: tuple[Kind, ...] = (
    Kind("leaks", "outputs_in_a_list", "outputs appended to a list", LEAK, expandable="any"),
    Kind("leaks", "total_of_losses", "`total = total + loss`, graphs kept", LEAK, expandable="any"),
    Kind("leaks", "hook", "a hook keeps activations", LEAK, expandable="any"),
    Kind("leaks", "many_lengths", "a leak of batches of many lengths", LEAK, expandable="any"),
    Kind(
        "leaks", "retained_graphs", "gradient accumulation, graphs retained", LEAK, expandable="any"
    ),
    Kind("leaks", "replay_buffer", "a replay buffer on the GPU", LEAK, expandable="any"),
    Kind("leaks", "adapters", "adapters created in a loop", LEAK, expandable="any"),
    Kind(
        "leaks",
        "cached_batches",
        "a data loader keeps its batches on the GPU",
        LEAK,
        expandable="any",
    ),
    Kind("leaks", "kept_exceptions", "exceptions keep their frames", LEAK, expandable="any"),
    Kind("leaks", "metrics_per_batch", "predictions kept for a metric", LEAK, expandable="any"),
    Kind(
        "leaks",
        "generation_cache",
        "generation, a cache of keys and values",
        LEAK,
        expandable="any",
    ),
    Kind("leaks", "late", "a leak that begins late", LEAK, expandable="any"),
    Kind("leaks", "stairs", "a leak in stairs, once per epoch", LEAK, expandable="any"),
    Kind("leaks", "small", "a leak of 64 KiB a step on a full GPU", LEAK, expandable="any"),
    Kind("leaks", "recovered", "a leak long after a caught OOM", LEAK, expandable="any"),
    Kind("leaks", "compiled", "a leak of a compiled model", LEAK, expandable="any"),
    Kind("leaks", "cycles", "garbage in reference cycles", _of("garbage"), expandable="any"),
    Kind("larger_steps", "longer_batches", "batches get longer", LARGER, expandable="any"),
    Kind("larger_steps", "curriculum", "sequences get longer in stages", LARGER, expandable="any"),
    Kind(
        "larger_steps", "longer_unrolling", "longer and longer unrolling", LARGER, expandable="any"
    ),
    Kind("larger_steps", "long_batch", "one long batch", LARGER),
    Kind(
        "larger_steps",
        "tight",
        "batches that vary, just below the limit",
        _of("tight", "stranded"),
        EITHER,
    ),
    Kind(
        "phases",
        "graphs_of_batches_not_trained_on",
        "evaluation in the training loop, graphs kept",
        NEW,
        expandable="any",
    ),
    Kind("phases", "under_no_grad", "evaluation under `no_grad`, large batches", NEW),
    Kind("phases", "without_no_grad", "evaluation without `no_grad`", NEW),
    Kind(
        "phases",
        "phase_with_a_name",
        "evaluation, named with `session.phase`",
        NEW,
        expandable="any",
    ),
    Kind("phases", "moving_average", "a copy of the model (EMA)", _of("new_phase", "larger_step")),
    Kind(
        "phases",
        "cloned_state",
        "a save clones the state on the GPU",
        _of("new_phase", "larger_step"),
    ),
    Kind("first_steps", "large_batch", "a batch far too large", FIRST),
    Kind("first_steps", "optimizer_state", "the optimizer's first step", FIRST),
    Kind("first_steps", "large_model", "a model that does not fit", FIRST),
    Kind("first_steps", "loaded_twice", "a checkpoint stays beside the model", FIRST),
    Kind("first_steps", "data_on_the_gpu", "a data set on the GPU", FIRST),
    Kind(
        "without_steps",
        "custom_optimizer",
        "an optimizer by hand, and a leak",
        _of("leak", UNKNOWN),
        expandable="any",
    ),
    Kind(
        "without_steps",
        "blocks_of_requests",
        "inference, blocks of many sizes",
        _of(UNKNOWN),
        FRAGMENTATION,
        "much",
    ),
    Kind(
        "without_steps",
        "more_requests",
        "inference, more and more requests",
        _of(UNKNOWN),
        expandable="any",
    ),
    Kind("others", "fraction_in_first_step", "a memory fraction, first step", FIRST, LIMIT),
    Kind("others", "fraction_with_leak", "a leak under a memory fraction", LEAK, LIMIT),
    Kind(
        "others",
        "fraction_with_longer_batch",
        "a longer batch under a memory fraction",
        LARGER,
        LIMIT,
    ),
    Kind(
        "others",
        "neighbor_before",
        "another process holds the GPU",
        _of("first_step", "outside"),
        EXTERNAL,
    ),
    Kind("others", "neighbor_comes", "another process comes", OUTSIDE, EXTERNAL),
    Kind("others", "neighbor_grows", "another process grows", OUTSIDE, EXTERNAL),
    Kind(
        "others",
        "communicators",
        "communicators are created in a loop",
        OUTSIDE,
        _of("capacity", "external"),
    ),
    Kind(
        "others",
        "second_rank",
        "a second rank on the GPU keeps tensors",
        OUTSIDE,
        _of("capacity", "external"),
        ranks=2,
    ),
    Kind("others", "private_pools", "a MemPool for each length", STRANDED, FRAGMENTATION),
    Kind(
        "others",
        "waiting_frees",
        "frees wait for a side stream",
        _of("tight", "larger_step"),
        _of("pending"),
    ),
    Kind(
        "fragmentation",
        "window",
        "tensors of many sizes, the latest kept",
        STRANDED,
        FRAGMENTATION,
        "much",
    ),
    Kind(
        "fragmentation",
        "evicted_at_random",
        "tensors of many sizes, dropped at random",
        STRANDED,
        FRAGMENTATION,
        "much",
    ),
    Kind(
        "fragmentation",
        "shuffled_buffers",
        "buffers replaced by others of new sizes",
        STRANDED,
        FRAGMENTATION,
        "much",
    ),
    Kind(
        "fragmentation",
        "phases",
        "pieces of an earlier phase, then a large tensor",
        _of("stranded", "larger_step"),
        FRAGMENTATION,
        "much",
    ),
)
SEEDS = {"tune": range(2), "report": range(100, 102)}


def cases(seeds: range) -> list[Case]:
    """Return every job of these seeds."""
    return [Case(kind, seed) for kind in KINDS for seed in seeds]
