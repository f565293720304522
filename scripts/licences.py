"""Writes the licence table of NOTICE from the metadata of the installed packages; `--check` only compares.

Run it after a dependency was added: `python scripts/licences.py`. It follows the requirements in setup.cfg through the requirements of
each package. Packages that only some builds of torch ask for (NVIDIA's libraries, triton) are not followed: they come with the
user's choice of torch.
"""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
RUNTIME_EXTRAS = ("tokenizers", "data", "wandb", "tensorboard")
GPU_EXTRAS = ("flash-attn",)
"""Extras that only install where there is a CUDA compiler; they are not followed either."""
DEVELOPMENT_EXTRAS = ("test", "dev")
OF_A_TORCH_BUILD = re.compile(r"nvidia-|cuda-|triton")
HEAD = """\
llmtrain
Copyright 2026 The llmtrain authors

Licensed under the Apache License, Version 2.0; see LICENSE.

llmtrain contains no code of others. It is used together with the packages below, which are installed by themselves under the licences
their authors state. The table is made by scripts/licences.py from the metadata of the packages in constraints.txt.
"""


def notice() -> str:
    """The whole text of NOTICE."""
    wanted = requirements()
    runtime = closure([*wanted[""], *(line for extra in RUNTIME_EXTRAS for line in wanted[extra])])
    development = closure(line for extra in DEVELOPMENT_EXTRAS for line in wanted[extra]) - runtime
    sections = (
        (f"Needed to run (with the extras {', '.join(RUNTIME_EXTRAS)})", runtime),
        ("Only for tests and gates", development),
    )
    return HEAD + "".join(f"\n{title}\n\n" + "".join(_table(names)) for title, names in sections)


def requirements() -> dict[str, list[str]]:
    """Requirement lines of setup.cfg by extra; the base ones under the empty name."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = parser["options.extras_require"].items()
    extras = {name: text.split("\n") for name, text in listed if name not in GPU_EXTRAS}
    lines = {"": parser["options"]["install_requires"].split("\n"), **extras}
    return {name: [line for line in texts if line.strip()] for name, texts in lines.items()}


def closure(lines: Iterable[str]) -> set[str]:
    """Canonical names of everything these requirement lines bring in on this machine."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in lines]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or OF_A_TORCH_BUILD.match(name):
            continue
        found.add(name)
        waiting += [inner for inner in map(Requirement, metadata.requires(name) or []) if _applies(inner, requirement.extras)]
    return found


def licence(name: str) -> str:
    """What a package's metadata says: the licence expression, else the first line of its free text if short, else its classifier."""
    fields = metadata.metadata(name)
    text = fields["License-Expression"] or fields["License"] or ""
    first_line = text.strip().partition("\n")[0]
    if first_line and len(first_line) < 120:
        return str(first_line)
    classifiers = [
        line.rpartition(" :: ")[2] for line in fields.get_all("Classifier") or [] if line.startswith("License :: OSI")
    ]
    return " / ".join(classifiers) or "not stated"


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def _table(names: Iterable[str]) -> Iterator[str]:
    return (f"  {name:28} {licence(name)}\n" for name in sorted(names))


def main(arguments: list[str]) -> int:
    """Write NOTICE, or say whether it is what would be written."""
    file, text = ROOT / "NOTICE", notice()
    if arguments != ["--check"]:
        file.write_text(text, encoding="utf-8")
        return 0
    if file.read_text(encoding="utf-8") == text:
        return 0
    print("NOTICE is not what the installed packages say: run python scripts/licences.py")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
