"""Write the generated parts of docs/ from the code: the precision table, the options with their keys, the failure-mode table.

    python scripts/make_docs.py [--check]

With --check nothing is written; the exit code is 1 when a page is out of date (`make test` runs it).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from llmtrain.config.compose import group_options
from llmtrain.config.keys import KeyInfo, leaves
from llmtrain.plan.precision import PRECISION_TABLES

ROOT = Path(__file__).parents[1]

FAILURE_MODES = {
    "B01": ("accumulation over micro-batches with unequal numbers of targets", ""),
    "B02": ("unequal numbers of targets on data-parallel ranks", "several processes"),
    "B04": ("pipeline schedules that scale gradients once per call", "pipelines"),
    "B05": ("the short window at the end of an epoch", ""),
    "B07": ("global norm and clipping over all parameters", "sharded layouts"),
    "B09": ("clipping before the loss scale is taken out", "fp16"),
    "B10": ("what counts as a step when an update is skipped or accumulated", "several processes"),
    "B12": ("vocabulary-parallel loss on gathered logits", "tensor parallelism"),
    "B13": ("embedding and head tied over pipeline stages", "pipelines"),
    "B14": ("models built on the meta device", "sharded layouts"),
    "B15": ("layers, batches and heads that do not divide", "pipelines, tensor parallelism"),
    "B17": ("padded vocabulary rows", "exports"),
    "B18": ("dropout under recompute", "compile, tensor and pipeline parallelism"),
    "B20": ("ranks that start from different weights", "several processes"),
    "B21": ("weight decay on gains and biases", "wrappers of sharded layouts"),
    "B22": ("first and last learning rate, phases of length 0", ""),
    "B24": ("learning rate after a resume", ""),
    "B25": ("resume in the middle of an epoch", "several processes"),
    "B26": ("epochs after a resume are whole", ""),
    "B27": ("data position under another batch split or world size", "several processes"),
    "B29": ("each sample once per epoch, another order each epoch", "several processes"),
    "B30": ("packed documents that see each other", "pipeline and context parallelism"),
    "B31": ("begin and end tokens exactly once", "foreign tokenizers"),
    "B32": ("token ids that do not fit the type of the file", "foreign token files"),
    "B33": ("empty, broken and giant documents", "jsonl and parquet"),
    "B35": ("targets shifted exactly once", "pipeline and context parallelism"),
    "B37": ("killed while saving", "several processes"),
    "B38": ("asynchronous saves", "asynchronous saves"),
    "B39": ("which checkpoints are kept", ""),
    "B42": ("moments loaded to their own parameter", "sharded layouts"),
    "B43": ("loose loading", "compile, sharded layouts"),
    "B44": ("resharding", "sharded layouts"),
    "B45": ("a resumed run is the same run", "several processes"),
    "B46": ("low-precision weights that do not move", "bf16 weights with stochastic rounding"),
    "B47": ("rotary angles in low precision", "sharded layouts"),
    "B48": ("loss in bf16", "vocabulary-parallel loss, compile"),
    "B49": ("rows that may attend to nothing", "other attention backends"),
    "B51": ("8-bit optimizer states", "8-bit optimizers"),
    "B52": ("compiling again and again", "compile"),
    "B53": ("evaluation is the token mean, and changes nothing", "several processes"),
    "B54": ("one process fails and all others wait", "several processes"),
    "B55": ("signals and requeueing", "several processes, Slurm"),
    "B56": ("options accepted and ignored", ""),
    "B58": ("logs after a resume, and what their numbers mean", "trackers"),
    "B59": ("FLOPs and MFU", "several processes"),
    "B60": ("export to other formats", "exports"),
}
"""Fault → (what it is about, the part of a later version in which it can also be made; its tests are owed there)."""


def precision_table() -> str:
    """One row per kind of tensor, one column per option."""
    names = list(PRECISION_TABLES)
    lines = [f"| tensor | {' | '.join(f'`{name}`' for name in names)} |", "|---" * (len(names) + 1) + "|"]
    for role in vars(PRECISION_TABLES[names[0]]):
        lines.append(f"| {role} | {' | '.join(getattr(PRECISION_TABLES[name], role) for name in names)} |")
    return "\n".join(lines)


def options_page() -> str:
    """Every group with its options, then every section with its keys."""
    lines = ["# Options and keys", "", "Made by scripts/make_docs.py from `configs/` and the schema.", "", "## Groups", ""]
    lines += ["| group | option | what it saves, costs and changes |", "|---|---|---|"]
    for group, options in group_options().items():
        lines += [f"| `{group}` | `{option}` | {summary} |" for option, summary in options.items()]
    by_section: dict[str, list[KeyInfo]] = {}
    for info in leaves().values():
        by_section.setdefault(info.name.partition(".")[0], []).append(info)
    for section, keys in by_section.items():
        lines += ["", f"## {section}", "", "| key | default | meaning | values |", "|---|---|---|---|"]
        lines += [f"| `{info.name}` | `{_written(info.default)}` | {info.doc} | {_values(info)} |" for info in keys]
    return "\n".join(lines) + "\n"


def _written(value: Any) -> str:
    """A default as one would type it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _values(info: KeyInfo) -> str:
    return info.describe() if info.built else "not available in this version"


def failure_modes_page() -> str:
    """Known faults of training frameworks, the tests that catch them here, and where more are owed."""
    tests: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for number in re.findall(r"def test_b(\d+)_", path.read_text()):
            tests.setdefault(f"B{number}", set()).add(path.relative_to(ROOT).as_posix())
    lines = [
        "# Failure modes",
        "",
        "Faults that training frameworks are known to have had, and the tests named after them (`pytest -k b25`). A fault that needs a part",
        "which this version does not have cannot be made yet; its tests come with that part. Made by scripts/make_docs.py.",
        "",
        "| fault | about | tests | owed with |",
        "|---|---|---|---|",
    ]
    for fault, (about, owed) in FAILURE_MODES.items():
        files = ", ".join(f"`{name}`" for name in sorted(tests.get(fault, ()))) or "–"
        lines.append(f"| {fault} | {about} | {files} | {owed or '–'} |")
    return "\n".join(lines) + "\n"


def training_page() -> str:
    """docs/training.md with the precision table put between its marks."""
    text = (ROOT / "docs/training.md").read_text()
    pattern = r"(<!-- precision table: begin[^\n]*-->\n).*?(<!-- precision table: end -->)"
    return re.sub(pattern, lambda found: found[1] + precision_table() + "\n" + found[2], text, flags=re.DOTALL)


def main() -> None:
    pages = {
        "docs/training.md": training_page(),
        "docs/options.md": options_page(),
        "docs/failure-modes.md": failure_modes_page(),
    }
    stale = [name for name, text in pages.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.exit(f"out of date: {', '.join(stale)}; run python scripts/make_docs.py" if stale else 0)
    for name in stale:
        (ROOT / name).write_text(pages[name])
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
