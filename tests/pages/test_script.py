"""The page's modules as one script: what it does, and what cannot be part of it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from torchmem.pages.script import script

MODULES = {
    "entry.js": 'import { double, Box as Crate } from "./math.js";\n'
    'import * as words from "./words.js";\n'
    "console.log(words.say(double(20)), new Crate().size);\n",
    "math.js": 'import { two } from "./words.js";\n'
    "/** Export of a number, import of another. */\n"
    "export function double(x) {\n  return x * two;\n}\n"
    "export class Box {\n  size = double(1);\n}\n",
    "words.js": 'console.log("once");\n'
    "export const two = 2;\nexport const say = (x) => `is ${x}`;\n"
    "export async function later() {}\nconst double = 1;\n",
}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not on PATH")
def test_the_script_does_what_the_modules_do() -> None:
    """Each module runs once, after those that it imports, with names of its own."""
    done = subprocess.run(
        ["node", "-"],
        input=script(MODULES.__getitem__, "entry.js"),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "once\nis 40 2\n"


@pytest.mark.parametrize(
    "source",
    [
        "export default 1;\n",
        "export let changing = 1;\n",
        'export * from "./math.js";\n',
        "const a = 1;\nexport { a };\n",
        'import "./math.js";\n',
        'import thing from "./math.js";\n',
        'const load = () => import("./math.js");\n',
        "const here = import.meta.url;\n",
        "const text = '</SCRIPT>';\n",
        "const text = '<!-- ';\n",
    ],
)
def test_unknown_forms_are_refused(source: str) -> None:
    """What would not mean the same in a script is an error that names the module."""
    with pytest.raises(ValueError, match=r"^entry\.js: cannot be part of a script"):
        script((MODULES | {"entry.js": source}).__getitem__, "entry.js")


def test_modules_in_a_circle_are_refused() -> None:
    """Neither of two modules that import each other can come first."""
    modules = {"a.js": 'import { b } from "./b.js";\n', "b.js": 'import { a } from "./a.js";\n'}
    with pytest.raises(ValueError, match="in a cycle"):
        script(modules.__getitem__, "a.js")
