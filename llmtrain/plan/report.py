"""A plan as text and as JSON: `plan.json` of a run folder, and how byte counts are written for people."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from llmtrain.plan.plan import Plan

FORMAT_VERSION = 1


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON values (`plan.json`), with the numbers a reader would otherwise have to work out."""
    fields: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    fields["batch"]["tokens_per_step"] = plan.batch.tokens_per_step
    fields["degrees"]["data_ranks"] = plan.degrees.data_ranks
    fields["forecast"]["total"] = plan.forecast.total
    return {"format_version": FORMAT_VERSION, **fields}


def format_bytes(count: float) -> str:
    """Bytes for a person: `512 B`, `959 KiB`, `1.50 MiB`, `219 MiB`, `1.52 GiB`."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 0.9995 * 1024**power:
            return f"{three_digits(count / 1024**power)} {unit}"
    return f"{count:.0f} B"


def three_digits(number: float) -> str:
    """A number of at least 1 with three significant digits, or all those before the point: `1.52`, `54.0`, `219`, `1,023`."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
