"""Write the generated parts of docs/ from the code: precision, attention and model tables, the options with their keys, the failure-mode table.

    python scripts/make_docs.py [--check]

With --check nothing is written; the exit code is 1 when a page is out of date (`make test` runs it).
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtrain.config.compose import compose_config, group_options
from llmtrain.config.defaults import BYTE_VOCAB_SIZE
from llmtrain.config.keys import KeyInfo, leaves
from llmtrain.config.typed import Llama3Scaling, ModelConfig, PositionKind
from llmtrain.plan.attention import ATTENTION, Kernel
from llmtrain.plan.precision import PRECISION_TABLES
from llmtrain.plan.shapes import num_parameters

ROOT = Path(__file__).parents[1]

FAILURE_MODES = {
    "B01": ("accumulation over micro-batches with unequal numbers of targets", ""),
    "B02": ("unequal numbers of targets on data-parallel ranks", ""),
    "B04": ("pipeline schedules that scale gradients once per call", "pipelines"),
    "B05": ("the short window at the end of an epoch", ""),
    "B07": ("global norm and clipping over all parameters", "sharded layouts"),
    "B09": ("clipping before the loss scale is taken out", "fp16"),
    "B10": ("what counts as a step when an update is skipped or accumulated", ""),
    "B12": ("vocabulary-parallel loss on gathered logits", "tensor parallelism"),
    "B13": ("embedding and head tied over pipeline stages", "pipelines"),
    "B14": ("models built on the meta device", "sharded layouts"),
    "B15": ("layers, batches and heads that do not divide", "pipelines, tensor parallelism"),
    "B17": ("padded vocabulary rows", "exports of sharded runs"),
    "B18": ("dropout under recompute", "compile, tensor and pipeline parallelism"),
    "B20": ("ranks that start from different weights", ""),
    "B21": ("weight decay on gains and biases", "wrappers of sharded layouts"),
    "B22": ("first and last learning rate, phases of length 0", ""),
    "B24": ("learning rate after a resume", ""),
    "B25": ("resume in the middle of an epoch", ""),
    "B26": ("epochs after a resume are whole", ""),
    "B27": ("data position under another batch split or world size", ""),
    "B29": ("each sample once per epoch, another order each epoch", ""),
    "B30": ("packed documents that see each other", "pipeline and context parallelism"),
    "B31": ("begin and end tokens exactly once", ""),
    "B32": ("token ids that do not fit the type of the file", ""),
    "B33": ("empty, broken and giant documents", ""),
    "B35": ("targets shifted exactly once", "pipeline and context parallelism"),
    "B37": ("killed while saving", ""),
    "B38": ("asynchronous saves", "asynchronous saves"),
    "B39": ("which checkpoints are kept", ""),
    "B42": ("moments loaded to their own parameter", "sharded layouts"),
    "B43": ("loose loading", "compile, sharded layouts"),
    "B44": ("resharding", "sharded layouts"),
    "B45": ("a resumed run is the same run", ""),
    "B46": ("low-precision weights that do not move", "bf16 weights with stochastic rounding"),
    "B47": ("rotary angles in low precision", "sharded layouts"),
    "B48": ("loss in bf16", "vocabulary-parallel loss, compile"),
    "B49": ("rows that may attend to nothing", ""),
    "B51": ("8-bit optimizer states", "8-bit optimizers"),
    "B52": ("compiling again and again", "compile"),
    "B53": ("evaluation is the token mean, and changes nothing", ""),
    "B54": ("one process fails and all others wait", ""),
    "B55": ("signals and requeueing", ""),
    "B56": ("options accepted and ignored", ""),
    "B58": ("logs after a resume, and what their numbers mean", ""),
    "B59": ("FLOPs and MFU", ""),
    "B60": ("export to other formats", "exports of sharded runs"),
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


def model_table() -> str:
    """One row per option of the group `model`, family by family, smallest first."""
    lines = ["| option | parameters | layers | dim | heads / kv | head_dim | hidden_dim | vocabulary | context | positions |"]
    lines.append("|---" * 10 + "|")
    models = {name: compose_config([f"model={name}"]).config.model for name in group_options()["model"]}
    rows = {name: replace(model, vocab_size=model.vocab_size or BYTE_VOCAB_SIZE) for name, model in models.items()}
    for name in sorted(rows, key=lambda name: (re.split("_[0-9]", name)[0], num_parameters(rows[name]))):
        model, heads = rows[name], rows[name].attention
        context = re.search(r"made for texts of (\d+) tokens", (ROOT / f"configs/model/{name}.yaml").read_text())
        cells = (
            f"`{name}`",
            f"{num_parameters(model):,}",
            f"{model.num_layers}",
            f"{model.dim}",
            f"{heads.num_heads} / {heads.num_kv_heads}",
            f"{heads.head_dim}",
            f"{model.feed_forward.hidden_dim}",
            "the tokenizer's" if models[name].vocab_size is None else f"{model.vocab_size}",
            context[1] if context else "as trained",
        )
        lines.append(f"| {' | '.join(cells)} | {_positions(model)} |")
    return "\n".join(lines)


def _positions(model: ModelConfig) -> str:
    """How order is told, in a few words."""
    if model.position is PositionKind.LEARNED:
        return "learned"
    scaling = model.rope_scaling
    stretch = f", llama3 × {scaling.factor:g}" if isinstance(scaling, Llama3Scaling) else ""
    return f"rotary, theta {model.rope_theta:.0f}{stretch}"


def attention_tables() -> str:
    """What each backend does with documents, windows and dropout; then one row per kernel and device."""
    lines = ["| backend | documents of a row | windows | dropout of weights |", "|---|---|---|---|"]
    for name, row in ATTENTION.items():
        lines.append(f"| `{name}` | {row.documents} | {row.windows} | {'yes' if row.dropout else 'no'} |")
    titles = "backend, kernel, device, dtypes, trains, documents and windows, deterministic, kept by recompute.keep=[attention], CUDA capability, channels of a head, package, tests"
    lines += ["", f"| {titles.replace(', ', ' | ')} |", "|---" * len(titles.split(", ")) + "|"]
    lines += [f"| `{name}` | {' | '.join(_kernel_cells(way))} |" for name, row in ATTENTION.items() for way in row.kernels]
    return "\n".join(lines)


def _kernel_cells(way: Kernel) -> list[str]:
    lowest, highest = (f"{limit[0]}.{limit[1]}" if limit else "" for limit in (way.capability, way.last_capability))
    capability = lowest if lowest == highest else f"{lowest} to {highest}" if highest else f"{lowest} or more"
    channels = [f"{way.smallest_head_dim} or more"] if way.smallest_head_dim > 1 else []
    channels += [" or ".join(map(str, (f"up to {way.largest_head_dim}", *way.other_head_dims)))] if way.largest_head_dim else []
    channels += [f"a multiple of {way.head_dim_multiple}"] if way.head_dim_multiple > 1 else []
    return [
        f"`{way.name}`" if way.name else "–",
        way.device,
        ", ".join(way.dtypes),
        "yes" if way.trains else "no",
        "yes" if way.masks else "no",
        ("yes" if way.deterministic else "no") if way.trains else "–",
        ("yes" if way.kept else "no") if way.trains else "–",
        capability if lowest else "any" if way.device == "cuda" else "–",
        ", ".join(channels) or "any",
        f"`{way.package}`" if way.package else "–",
        "run" if way.ran else "not yet run",
    ]


def training_page() -> str:
    """docs/training.md with the precision table put between its marks."""
    return _filled("docs/training.md", "precision table", precision_table())


def models_page() -> str:
    """docs/models.md with the table of presets put between its marks."""
    return _filled("docs/models.md", "model table", model_table())


def attention_page() -> str:
    """docs/attention.md with the tables of backends and kernels put between its marks."""
    return _filled("docs/attention.md", "attention tables", attention_tables())


def _filled(page: str, mark: str, table: str) -> str:
    pattern = rf"(<!-- {mark}: begin[^\n]*-->\n).*?(<!-- {mark}: end -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{table}\n{found[2]}", (ROOT / page).read_text(), flags=re.DOTALL)


def main() -> None:
    pages = {
        "docs/training.md": training_page(),
        "docs/attention.md": attention_page(),
        "docs/models.md": models_page(),
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
