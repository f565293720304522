"""`plan.json` holds everything that was settled, as plain JSON; bytes are written for people in one way."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.plan import Plan
from llmtrain.plan.report import FORMAT_VERSION, format_bytes, plan_to_dict


def test_round_trip(make_config, make_machine) -> None:
    plan = make_plan(make_config({"model.tie_embeddings": True, "loss.kind": "chunked"}), make_machine())
    written = plan_to_dict(plan)
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert set(written) == {field.name for field in fields(Plan)} | {"format_version"}
    assert written["format_version"] == FORMAT_VERSION
    assert written["model"]["attention"]["head_dim"] == plan.model.attention.head_dim
    assert written["schedule"]["kind"] == "cosine"
    assert written["tied"] == [["embed.weight", "head.weight"]]
    assert written["loss"] == {"chunk_size": 1024, "kind": "chunked"}
    assert written["forecast"]["total"] == plan.forecast.total
    assert written["batch"]["tokens_per_step"] == 16 * 256
    assert [choice["key"] for choice in written["choices"]] == [choice.key for choice in plan.choices]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (959 * 2**10, "959 KiB"),
        (2**20, "1.00 MiB"),
        (25.5 * 2**20, "25.5 MiB"),
        (224395264, "214 MiB"),
        (2**30 - 2**20, "1,023 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (2**31 + 2**29, "2.50 GiB"),
        (137.9 * 2**30, "138 GiB"),
    ],
)
def test_bytes_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text
