"""Model presets hold the published numbers, compose and plan at once, and docs/models.md says what they are."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import yaml
from helpers.scripts import ROOT, load_script

from llmtrain.config.compose import compose_config, group_options
from llmtrain.config.errors import ConfigError
from llmtrain.config.typed import (
    FeedForwardKind,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NormKind,
    PositionKind,
    YarnScaling,
)
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.plan import Availability, Machine
from llmtrain.plan.shapes import num_parameters

pytestmark = pytest.mark.usefixtures("remembered_files")

OWN = ("tiny", "small", "tiny_gpt2", "small_gpt2")
COLUMNS = ("parameters", "context", "num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "hidden_dim", "theta", "tied")
PUBLISHED = {
    "gpt2_124m": (124_439_808, 1024, 12, 768, 12, 12, 64, 3072, None, True),
    "gpt2_355m": (354_823_168, 1024, 24, 1024, 16, 16, 64, 4096, None, True),
    "gpt2_774m": (774_030_080, 1024, 36, 1280, 20, 20, 64, 5120, None, True),
    "gpt2_1558m": (1_557_611_200, 1024, 48, 1600, 25, 25, 64, 6400, None, True),
    "llama3_1b": (1_235_814_400, 131_072, 16, 2048, 32, 8, 64, 8192, 5e5, True),
    "llama3_3b": (3_212_749_824, 131_072, 28, 3072, 24, 8, 128, 8192, 5e5, True),
    "llama3_8b": (8_030_261_248, 131_072, 32, 4096, 32, 8, 128, 14_336, 5e5, False),
    "llama3_70b": (70_553_706_496, 131_072, 80, 8192, 64, 8, 128, 28_672, 5e5, False),
    "llama3_405b": (405_853_388_800, 131_072, 126, 16_384, 128, 8, 128, 53_248, 5e5, False),
    "qwen3_0.6b": (596_049_920, 32_768, 28, 1024, 16, 8, 128, 3072, 1e6, True),
    "qwen3_1.7b": (1_720_574_976, 32_768, 28, 2048, 16, 8, 128, 6144, 1e6, True),
    "qwen3_4b": (4_022_468_096, 32_768, 36, 2560, 32, 8, 128, 9728, 1e6, True),
    "qwen3_8b": (8_190_735_360, 32_768, 36, 4096, 32, 8, 128, 12_288, 1e6, False),
    "qwen3_14b": (14_768_307_200, 32_768, 40, 5120, 40, 8, 128, 17_408, 1e6, False),
    "qwen3_32b": (32_762_123_264, 32_768, 64, 5120, 64, 8, 128, 25_600, 1e6, False),
    "smollm2_135m": (134_515_008, 8192, 30, 576, 9, 3, 64, 1536, 1e5, True),
    "smollm2_360m": (361_821_120, 8192, 32, 960, 15, 5, 64, 2560, 1e5, True),
    "smollm2_1.7b": (1_711_376_384, 8192, 24, 2048, 32, 32, 64, 8192, 1.3e5, True),
}
"""Typed from model cards and config.json files, the parameters from the sizes of the published weights."""
VOCABULARIES = {"gpt2": 50_257, "llama3": 128_256, "qwen3": 151_936, "smollm2": 49_152}


def model_of(preset: str) -> ModelConfig:
    return compose_config([f"model={preset}"]).config.model


def text_of(preset: str) -> str:
    return (ROOT / f"configs/model/{preset}.yaml").read_text(encoding="utf-8")


def test_every_preset_is_in_the_table() -> None:
    assert set(group_options()["model"]) == {*PUBLISHED, *OWN}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_the_published_numbers(preset: str) -> None:
    published = dict(zip(COLUMNS, PUBLISHED[preset], strict=True))
    model = model_of(preset)
    assert model.vocab_size == VOCABULARIES[preset.partition("_")[0]]
    assert num_parameters(model) == published["parameters"]
    for name in ("num_layers", "dim"):
        assert getattr(model, name) == published[name]
    for name in ("num_heads", "num_kv_heads", "head_dim"):
        assert getattr(model.attention, name) == published[name]
    assert (model.feed_forward.hidden_dim, model.tie_embeddings) == (published["hidden_dim"], published["tied"])
    stated = re.search(
        r"^# .+ of ([\d,]+) parameters, made for texts of (\d+) tokens; numbers of \S+/\S+\.$", text_of(preset), re.M
    )
    assert stated is not None
    assert (int(stated[1].replace(",", "")), int(stated[2])) == (published["parameters"], published["context"])


@pytest.mark.parametrize("preset", PUBLISHED)
def test_what_a_family_has_in_common(preset: str) -> None:
    model, family = model_of(preset), preset.partition("_")[0]
    heads, inner, gpt2 = model.attention, model.feed_forward, family == "gpt2"
    assert (heads.bias, heads.output_bias, inner.bias) == (gpt2, gpt2, gpt2)
    assert heads.qk_norm == (family == "qwen3") and set(model.layer_windows) == {None}
    assert model.norm_eps == (1e-6 if family == "qwen3" else 1e-5)
    assert model.init_std == (1 / 24 if preset == "smollm2_135m" else 0.02)
    if gpt2:
        assert (model.position, model.norm, inner.kind) == (PositionKind.LEARNED, NormKind.LAYER, FeedForwardKind.GELU)
        assert (model.max_positions, model.depth_scaled_init) == (1024, True)
    else:
        assert (model.position, model.norm, inner.kind) == (PositionKind.ROTARY, NormKind.RMS, FeedForwardKind.SWIGLU)
        assert model.rope_theta == PUBLISHED[preset][COLUMNS.index("theta")]
    factor = 32.0 if preset in ("llama3_1b", "llama3_3b") else 8.0
    assert model.rope_scaling == (Llama3Scaling(factor, 8192, 1.0, 4.0) if family == "llama3" else None)


def test_the_first_line_states_the_size() -> None:
    for preset, (parameters, *_) in PUBLISHED.items():
        stated = re.search(r"costs (\S+) times the parameters of (\S+);", text_of(preset).splitlines()[0])
        if stated is None:
            assert parameters == min(PUBLISHED[name][0] for name in PUBLISHED if name[:4] == preset[:4])
        else:
            assert float(stated[1]) == float(f"{parameters / PUBLISHED[stated[2]][0]:.3g}")


def test_the_file_name_can_be_a_word_of_every_kind(tmp_path: Any) -> None:
    """A dot in an option's name: on the command line, in a list, in a defaults list, under an override."""
    for word in ("model=qwen3_0.6b", "+model=qwen3_0.6b", "model=[qwen3_0.6b]"):
        composed = compose_config([word])
        assert (composed.groups["model"], composed.config.model.dim) == ("qwen3_0.6b", 1024)
    (tmp_path / "model").mkdir()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "model/mine.yaml").write_text("defaults: [smollm2_1.7b, _self_]\nnum_layers: 3\n")
    (tmp_path / "experiment/theirs.yaml").write_text("# @package _global_\ndefaults:\n  - override /model: [qwen3_1.7b]\n")
    mine = compose_config(["model=mine"], config_dirs=[tmp_path]).config.model
    assert (mine.dim, mine.num_layers, mine.rope_theta) == (2048, 3, 130000.0)
    assert compose_config(["+experiment=theirs"], config_dirs=[tmp_path]).config.model.feed_forward.hidden_dim == 6144


def test_a_rotary_preset_takes_any_length_and_gpt2_its_table() -> None:
    assert compose_config(["model=llama3_1b", "data.sequence_length=200000"]).config.model.max_positions == 200_000
    assert compose_config(["model=llama3_1b", "model.rope.scaling.kind=none"]).config.model.rope_scaling is None
    with pytest.raises(ConfigError, match=r"model.max_positions=1024"):
        compose_config(["model=gpt2_124m", "data.sequence_length=2048"])


@pytest.mark.parametrize(
    "words", ["", "data.sequence_length=8192 recompute=full loss=chunked accumulation.global_batch_size=2048"]
)
def test_the_largest_composes_and_plans_at_once(words: str) -> None:
    start = time.process_time()
    config = compose_config(["model=llama3_405b", *words.split()]).config
    machine = Machine(
        device="cuda",
        device_reason="",
        device_name="a device with the memory of a cluster",
        num_devices=1,
        memory_bytes=2**46,
        cores=64,
        world_size=1,
        world_source="one process",
        bf16_native=True,
        options={"attention.backend=sdpa": Availability(True)},
    )
    plan = make_plan(config, machine)
    assert time.process_time() - start < 2.0
    assert plan.num_parameters == 405_853_388_800
    assert plan.forecast.params >= 4 * plan.num_parameters and plan.forecast.optimizer >= 8 * plan.num_parameters
    assert plan.batch.micro_batch_size * plan.batch.num_microbatches == config.accumulation.global_batch_size


def test_the_page_is_made_from_the_presets() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert page == load_script("make_docs").models_page()
    for preset, (parameters, context, layers, *_) in PUBLISHED.items():
        (row,) = re.findall(rf"^\| `{re.escape(preset)}` \|.*$", page, re.M)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:3] == [f"{parameters:,}", str(layers)] and cells[8] == str(context)


def test_the_model_of_the_page_composes(tmp_path: Any) -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    assert len(yaml.safe_load(text)) == 7 and len(text.splitlines()) <= 16
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text(text)
    model = compose_config(["model=mine"], config_dirs=[tmp_path]).config.model
    assert model.layer_windows == (1024, 1024, 1024, None) * 3
    assert (model.attention.head_dim, model.attention.qk_norm, model.rope_theta) == (64, True, 500000.0)


def test_kinds_of_the_page_are_kinds_of_the_schema() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    kinds = re.findall(r"^\| `(\w+)` \| [^|]+ \| `factor`", page, re.M)
    given = {"linear": (), "llama3": ("original_max_positions=8192",), "yarn": ("original_max_positions=8192",)}
    assert kinds == list(given)
    for kind, scaling in zip(kinds, (LinearScaling, Llama3Scaling, YarnScaling), strict=True):
        words = [f"model.rope.scaling.{word}" for word in (f"kind={kind}", "factor=2", *given[kind])]
        assert isinstance(compose_config(words).config.model.rope_scaling, scaling)
