"""One script from the modules of the live page, for a page that is opened from a file.

Browsers load no modules from files. Each module becomes a function that is called once, and what it
exports becomes an object. Only the forms of import and export that the page uses are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from graphlib import TopologicalSorter

_IMPORT = re.compile(r'^import (?:\* as (\w+)|\{([^}]*)\}) from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_UNKNOWN = re.compile(
    r"^\s*(?:import|export)\b.*|.*(?:\bimport\s*\(|\bimport\.meta\b).*", re.MULTILINE
)
_MARKUP = re.compile(r"</script|<!--", re.IGNORECASE)


def script(read: Callable[[str], str], entry: str) -> str:
    """Return a script that does what the module `entry` and those that it imports do.

    `read` returns the source of a module by its file name. Raises ValueError for source that cannot
    be turned into such a script.
    """
    sources = _sources(read, entry)
    imports = {name: {match[3] for match in _IMPORT.finditer(s)} for name, s in sources.items()}
    order = TopologicalSorter(imports).static_order()  # raises a ValueError for a circle
    modules = "\n".join(_called(name, sources[name]) for name in order)
    return f'(() => {{\n"use strict";\nconst modules = {{}};\n{modules}\n}})();\n'


def _sources(read: Callable[[str], str], entry: str) -> dict[str, str]:
    sources, names = dict[str, str](), [entry]
    for name in names:
        if name not in sources:
            sources[name] = read(name)
            names.extend(match[3] for match in _IMPORT.finditer(sources[name]))
    return sources


def _called(name: str, source: str) -> str:
    """Return a module as a function that is called, with its imports before it."""
    exported = ", ".join(match[2] for match in _EXPORT.finditer(source))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(_constants, source))
    unknown = _UNKNOWN.search(_without_comments(body)) or _MARKUP.search(body)
    if unknown:
        raise ValueError(f"{name}: cannot be part of a script: {unknown[0].strip()}")
    return f'modules["{name}"] = (() => {{\n{body}return {{ {exported} }};\n}})();'


def _without_comments(source: str) -> str:
    return re.sub(r"^\s*(?://|\*|/\*).*$", "", source, flags=re.MULTILINE)


def _constants(match: re.Match[str]) -> str:
    everything, names, module = match.groups()
    target = everything or f"{{{names.replace(' as ', ': ')}}}"
    return f'const {target} = modules["{module}"];'
