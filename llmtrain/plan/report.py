"""A plan as text and as JSON: `plan.json` of a run folder, and how byte counts are written for people."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from llmtrain.plan.plan import Plan

FORMAT_VERSION = 1

MIB = 2**20
GIB = 2**30


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON values (`plan.json`), with the numbers a reader would otherwise have to work out."""
    fields: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    fields["batch"]["tokens_per_step"] = plan.batch.tokens_per_step
    fields["degrees"]["data_ranks"] = plan.degrees.data_ranks
    fields["forecast"]["total"] = plan.forecast.total
    return {"format_version": FORMAT_VERSION, **fields}


def format_bytes(count: int) -> str:
    """Bytes for a person: MiB below one GiB, GiB from there on (`214 MiB`, `1.53 GiB`)."""
    return f"{count / MIB:,.0f} MiB" if count < GIB else f"{count / GIB:,.2f} GiB"
