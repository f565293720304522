"""`llmtrain doctor`: what is installed, what the machine is, and which options can be used here, with the reason where not."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from llmtrain import __version__
from llmtrain.cli.arguments import Arguments
from llmtrain.cli.request import compose
from llmtrain.cli.text import name_rows, page_width
from llmtrain.cli.verbs import NOT_AVAILABLE
from llmtrain.config.compose import group_options
from llmtrain.config.keys import choice_key
from llmtrain.config.schema import GROUPS
from llmtrain.dist.world import SLURM, TORCHRUN
from llmtrain.plan.attention import ATTENTION, AUTO, Use, refusal
from llmtrain.plan.plan import Availability, Machine

PACKAGES = (
    *("torch", "hydra-core", "omegaconf", "numpy", "safetensors", "rich", "tokenizers", "tiktoken", "sentencepiece"),
    *("pyarrow", "zstandard", "wandb", "tensorboard", "flash-attn"),
)
AVAILABLE = Availability(True)
LATER = Availability(False, NOT_AVAILABLE)
STARTERS = {TORCHRUN: f"{TORCHRUN}, of torchrun or a script", SLURM: f"{SLURM}, of srun"}
"""Where the number of processes comes from, in the words of somebody who asks who started them."""


def run(arguments: Arguments) -> int:
    """Print the report; with output=json one document."""
    composed = compose(arguments)
    from llmtrain.train.machine import detect_machine  # here: torch is only needed once the command line is known to be good

    machine = detect_machine(composed.config.launch)
    listed = {group: list(options) for group, options in group_options(arguments.config_dirs).items()}
    report = {
        "llmtrain": __version__,
        "versions": versions(),
        "machine": machine_facts(machine),
        "options": {
            group: {name: _entry(group, name, found, machine) for name, found in options.items()}
            for group, options in option_table(listed, machine.options).items()
        },
    }
    print(json.dumps(report, indent=2) if composed.config.output == "json" else "\n".join(_page(report, machine)))
    return 0


def versions() -> dict[str, str]:
    """Version of Python and of each package the program builds on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine_facts(machine: Machine) -> dict[str, Any]:
    """The record of the machine without its options; sizes in bytes."""
    left_out = ("options", "core_limits", "memory_limits")
    facts = {name: value for name, value in vars(machine).items() if name not in left_out}
    return facts | {"host_memory_bytes": machine.host_memory_bytes}


def option_table(listed: Mapping[str, list[str]], answers: Mapping[str, Availability]) -> dict[str, dict[str, Availability]]:
    """Availability of every option of every group.

    Args:
        listed: group → options that have a file.
        answers: what the parts say about their own options (`Machine.options`).

    Returns:
        Group → option → availability: the options with a file, then the words of the group's choosing key without one.
    """
    table = {}
    for group in GROUPS:
        info = choice_key(group)
        words = [] if info is None else [*info.choices, *info.later]
        later = () if info is None else info.later
        table[group] = {
            option: _answer(group, option, info.name if info else group, later, answers)
            for option in dict.fromkeys([*listed.get(group, []), *words])
        }
    return table


def _answer(group: str, option: str, key: str, later: tuple[str, ...], answers: Mapping[str, Availability]) -> Availability:
    if option in later:
        return LATER
    return answers.get(f"{group}={option}") or answers.get(f"{key}={option}") or AVAILABLE


def _entry(group: str, option: str, found: Availability, machine: Machine) -> dict[str, Any]:
    """What the report says of an option; `limit` only where it works but not for everything."""
    entry: dict[str, Any] = {"available": found.available, "reason": found.reason}
    use = Use(machine.device, training=True, capability=machine.capability, packages=machine.packages)
    if group == "attention" and option in ATTENTION and found.available and refusal(option, AUTO, use):
        entry["limit"] = f"no training on {machine.device}"
    return entry


def _page(report: Mapping[str, Any], machine: Machine) -> list[str]:
    device = f"{machine.device} · {machine.device_name} · {machine.num_devices}   ({machine.device_reason})"
    facts = [
        ("device", device),
        ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB{' for each rank' if machine.local_world_size > 1 else ''}"),
        ("cores", str(machine.cores)),
        ("bf16", "native" if machine.bf16_native else "not native"),
        ("processes", _processes(machine)),
    ]
    width = page_width()
    lines = [f"llmtrain {__version__} doctor", "", *name_rows(list(report["versions"].items()), width, "versions"), ""]
    lines += [*name_rows(facts, width, "machine"), "", "options"]
    for group, options in report["options"].items():
        lines += name_rows(_by_answer(options) or [("–", NOT_AVAILABLE)], width, group)
    return lines


def _processes(machine: Machine) -> str:
    """How many, what says so, and where they are."""
    words = [STARTERS.get(machine.world_source, machine.world_source)]
    if machine.world_size > 1:
        hosts = "1 host" if machine.num_nodes == 1 else f"{machine.num_nodes} hosts"
        words.append(f"{machine.local_world_size} on this host, {hosts}")
    return f"{machine.world_size}   ({'; '.join(words)})"


def _by_answer(options: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """One row for the options that can be used and one for each reason why others cannot."""
    names: dict[str, list[str]] = {}
    for name, found in options.items():
        shown = f"{name} ({found['limit']})" if "limit" in found else name
        names.setdefault("" if found["available"] else found["reason"], []).append(shown)
    return [
        ("refused", f"{', '.join(of)}: {reason}") if reason else ("available", ", ".join(of)) for reason, of in names.items()
    ]
