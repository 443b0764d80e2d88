"""How a preflight sets an option of the script, for several runs with different values."""

from __future__ import annotations

from collections.abc import Sequence


def option_of(command: Sequence[str], name: str) -> str:
    """Return how a command spells the option `name`.

    "{name}" if it occurs in the command; `name` itself if that has dashes or the command has
    "name=", as with Hydra; else "--name".
    """
    if any(_placeholder(name) in word for word in command):
        return _placeholder(name)
    if name.startswith("-") or any(word.startswith(f"{name}=") for word in command):
        return name
    return f"--{name}"


def with_value(command: Sequence[str], option: str, value: str) -> tuple[str, ...]:
    """Return the command with an option of `option_of` set to `value`.

    A placeholder is replaced wherever it occurs, and a word that consists of it is left out if the
    value is empty. Another option has its value replaced, or else is appended.
    """
    if option.startswith("{"):
        kept = (word for word in command if value or word != option)
        return tuple(word.replace(option, value) for word in kept)
    words = list(command)
    for index, word in enumerate(words):
        if word.startswith(f"{option}="):
            words[index] = f"{option}={value}"
            return tuple(words)
        if word == option and index + 1 < len(words):
            words[index + 1] = value
            return tuple(words)
    return (*words, option, value)


def _placeholder(name: str) -> str:
    return "{" + name + "}"
