"""A trainer for rl_engine.py, in a process of its own: it does what each line on stdin says.

It keeps tensors that it can spare, such as an optimizer's state, and gives them back when asked.
"""

from __future__ import annotations

import json
import select
import sys

import torch

from torchmem import sdk

MIB = 1 << 20
session = sdk.instrument(run="trainer", interval=0.05)
model = torch.nn.Linear(256, 256, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept: list[torch.Tensor] = []
asked: list[int] = []


@session.on_pressure
def give_back(wanted: int) -> int:
    """Give back what is kept."""
    asked.append(wanted)
    freed = sum(int(tensor.nbytes) for tensor in kept)
    kept.clear()
    return freed


def take(mebibytes: int) -> torch.Tensor:
    """Return a tensor of this size."""
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


def step(mebibytes: int = 1) -> None:
    """Run one step that needs this much besides the model."""
    activations = take(mebibytes)
    model(torch.zeros(4, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    del activations


def steps_until_a_line_comes() -> int:
    """Train on, as a trainer does that does not know of the engine; return the steps."""
    count = 0
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        step()
        count += 1
    return count


def does(order: str, *words: str) -> object:
    """Follow an order and return the result."""
    if order == "wait":
        return session.wait_for_memory(
            int(words[0]) * MIB, float(words[1]), take=False, borrow="borrow" in words
        )
    if order == "keep":
        kept.append(take(int(words[0])))
        step()
        return True
    step(int(words[0]))
    return True


def main() -> None:
    """Follow the orders until stdin ends."""
    step()
    print(json.dumps("ready"), flush=True)
    for line in iter(sys.stdin.readline, ""):
        order = line.split()
        print(json.dumps(None), flush=True)  # it has been read
        if order == ["train"]:
            result: object = {"steps": steps_until_a_line_comes(), "asked": asked}
        elif order == ["idle"]:
            with session.idle():
                select.select([sys.stdin], [], [])
            result = {"asked": asked}
        else:
            result = does(*order)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
