"""Weights of a Hugging Face folder: names, shards, dtypes, ties; and everything that is not as it should be, listed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.models import GPT2_LIKE, LLAMA_LIKE, QK_NORM, VOCAB_SIZE
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmtrain.checkpoint.hf_families import GPT2, LLAMA, QWEN3, Family, family_of
from llmtrain.checkpoint.hf_weights import INDEX, SINGLE, read_weights, write_weights
from llmtrain.config.errors import ConfigError, StorageError
from llmtrain.config.typed import ModelConfig
from llmtrain.plan.shapes import parameter_shapes

TIED = replace(LLAMA_LIKE, tie_embeddings=True)
QWEN3_LIKE = replace(QK_NORM, attention=replace(QK_NORM.attention, output_bias=True))
MODELS = {
    "llama": LLAMA_LIKE,
    "tied": TIED,
    "qwen3": QWEN3_LIKE,
    "gpt2": GPT2_LIKE,
    "untied gpt2": replace(GPT2_LIKE, tie_embeddings=False),
}


def weights(model: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(model).items()}


def written(folder: Path, model: ModelConfig, *, dtype: str = "fp32", shard_bytes: int = 10**9) -> list[str]:
    return write_weights(folder, weights(model), model, family_of(model), dtype=dtype, shard_bytes=shard_bytes)


def listed(folder: Path, model: ModelConfig) -> str:
    """What is said about a folder that is refused."""
    with pytest.raises(StorageError) as caught:
        read_weights(folder, model, family_of(model))
    return str(caught.value)


def change(folder: Path, **changed: Tensor | None) -> dict[str, Tensor]:
    """Rewrite the single file with tensors added, replaced or (None) taken out; names with `__` for dots."""
    tensors: dict[str, Tensor | None] = dict(load_file(folder / SINGLE))
    tensors |= {name.replace("__", "."): tensor for name, tensor in changed.items()}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / SINGLE, metadata={"format": "pt"})
    return kept


@pytest.mark.parametrize("shard_bytes", [10**9, 9000, 1], ids=["one file", "shards", "a file each"])
@pytest.mark.parametrize("name", MODELS)
def test_b60_what_is_written_is_read_back_bit_for_bit(name: str, shard_bytes: int, tmp_path: Path) -> None:
    model = MODELS[name]
    names = written(tmp_path, model, shard_bytes=shard_bytes)
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    back = read_weights(tmp_path, model, family_of(model))
    expected = weights(model)
    assert list(back) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(back[key], tensor), key
    assert len({tensor.data_ptr() for tensor in back.values()}) == len(back)


def test_shards_are_what_the_index_says(tmp_path: Path) -> None:
    names = written(tmp_path, LLAMA_LIKE, shard_bytes=9000)
    count = len(names) - 1
    assert names == [*(f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)), INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    held = {name: file for file in names[:-1] for name in load_file(tmp_path / file)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in weights(LLAMA_LIKE).values())
    sizes = {file: [tensor.nbytes for tensor in load_file(tmp_path / file).values()] for file in names[:-1]}
    assert all(sum(size) <= 9000 or len(size) == 1 for size in sizes.values())


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_other_dtypes_are_rounded_once_and_become_fp32_masters(dtype: str, kind: torch.dtype, tmp_path: Path) -> None:
    written(tmp_path, GPT2_LIKE, dtype=dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / SINGLE).values()} == {kind}
    back = read_weights(tmp_path, GPT2_LIKE, GPT2)
    for name, tensor in weights(GPT2_LIKE).items():
        assert back[name].dtype == torch.float32 and torch.equal(back[name], tensor.to(kind).float()), name


def test_fp64_weights_are_read(tmp_path: Path) -> None:
    written(tmp_path, LLAMA_LIKE)
    save_file({name: tensor.double() for name, tensor in load_file(tmp_path / SINGLE).items()}, tmp_path / SINGLE)
    assert torch.equal(read_weights(tmp_path, LLAMA_LIKE, LLAMA)["norm.weight"], weights(LLAMA_LIKE)["norm.weight"])


def test_fp16_that_cannot_hold_a_weight_is_refused(tmp_path: Path) -> None:
    large = weights(LLAMA_LIKE)
    large["norm.weight"][3] = 7e4
    with pytest.raises(ConfigError, match="norm.weight has values beyond the largest of fp16, 65,504"):
        write_weights(tmp_path, large, LLAMA_LIKE, LLAMA, dtype="fp16", shard_bytes=10**9)


@pytest.mark.parametrize(("model", "family"), [(LLAMA_LIKE, LLAMA), (GPT2_LIKE, GPT2), (QWEN3_LIKE, QWEN3)])
def test_files_without_the_prefix_are_read(model: ModelConfig, family: Family, tmp_path: Path) -> None:
    written(tmp_path, model)
    bare = {name.removeprefix(family.prefix): tensor for name, tensor in load_file(tmp_path / SINGLE).items()}
    save_file(bare, tmp_path / SINGLE)
    back = read_weights(tmp_path, model, family)
    assert all(torch.equal(back[name], tensor) for name, tensor in weights(model).items())


def test_b43_another_prefix_matches_nothing_and_everything_is_listed(tmp_path: Path) -> None:
    written(tmp_path, LLAMA_LIKE)
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in load_file(tmp_path / SINGLE).items()}
    save_file(wrapped, tmp_path / SINGLE)
    told = listed(tmp_path, LLAMA_LIKE)
    assert told.count("missing     ") == told.count("not wanted  ") == len(wrapped)


def test_the_same_tensor_with_and_without_prefix_is_refused(tmp_path: Path) -> None:
    written(tmp_path, LLAMA_LIKE)
    change(tmp_path, norm__weight=torch.ones(32))
    assert "twice       norm.weight, as model.norm.weight and as norm.weight" in listed(tmp_path, LLAMA_LIKE)


def test_b43_missing_extra_and_misshaped_tensors_are_all_listed(tmp_path: Path) -> None:
    written(tmp_path, LLAMA_LIKE)
    change(
        tmp_path,
        model__norm__weight=None,
        lm_head__weight=torch.zeros(VOCAB_SIZE + 3, 32),
        model__layers__1__mlp__up_proj__weight=torch.zeros(48, 32, dtype=torch.int8),
        model__layers__2__mlp__up_proj__weight=torch.zeros(48, 32),
    )
    told = listed(tmp_path, LLAMA_LIKE)
    assert "missing     model.norm.weight [32]" in told
    assert f"shape       lm_head.weight is [{VOCAB_SIZE + 3}, 32], config.json says [{VOCAB_SIZE}, 32]" in told
    assert "not wanted  model.layers.2.mlp.up_proj.weight [48, 32]" in told
    assert "dtype       model.layers.1.mlp.up_proj.weight is I8" in told


def test_b43_a_missing_shard_is_named(tmp_path: Path) -> None:
    names = written(tmp_path, LLAMA_LIKE, shard_bytes=9000)
    lost = load_file(tmp_path / names[1])
    (tmp_path / names[1]).unlink()
    told = listed(tmp_path, LLAMA_LIKE)
    assert f"missing     the file {names[1]}" in told
    assert all(f"missing     {name} " in told for name in lost)


def test_b43_index_and_shards_that_disagree(tmp_path: Path) -> None:
    names = written(tmp_path, LLAMA_LIKE, shard_bytes=9000)
    index = json.loads((tmp_path / INDEX).read_text())
    moved = next(name for name, file in index["weight_map"].items() if file == names[0])
    index["weight_map"][moved] = names[1]
    (tmp_path / INDEX).write_text(json.dumps(index))
    told = listed(tmp_path, LLAMA_LIKE)
    assert f"missing     {moved}, which the index says is in {names[1]}" in told
    assert f"not wanted  {moved} in {names[0]}, which the index does not list" in told


@pytest.mark.parametrize("place", ["../model-00001.safetensors", "/etc/passwd", 7])
def test_an_index_leads_nowhere_else(place: object, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": place}}))
    assert "no index of safetensors files" in listed(tmp_path, LLAMA_LIKE)


def test_a_torn_file_is_told(tmp_path: Path) -> None:
    written(tmp_path, LLAMA_LIKE)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:-100])
    assert f"damaged     {SINGLE}" in listed(tmp_path, LLAMA_LIKE)


def test_b14_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    written(tmp_path, TIED)
    embedding = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=embedding.clone())
    assert "head.weight" not in read_weights(tmp_path, TIED, LLAMA)
    embedding[5, 5] += 1
    change(tmp_path, lm_head__weight=embedding)
    assert "tied        lm_head.weight is not equal to embed_tokens.weight" in listed(tmp_path, TIED)


def test_b14_a_tied_matrix_may_be_stored_as_the_head_alone(tmp_path: Path) -> None:
    written(tmp_path, TIED)
    embedding = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    change(tmp_path, model__embed_tokens__weight=None, lm_head__weight=embedding)
    assert torch.equal(read_weights(tmp_path, TIED, LLAMA)["embed.weight"], embedding)


def test_b14_a_head_of_its_own_is_never_made_up(tmp_path: Path) -> None:
    written(tmp_path, LLAMA_LIKE)
    change(tmp_path, lm_head__weight=None)
    assert "missing     lm_head.weight" in listed(tmp_path, LLAMA_LIKE)


def test_buffers_of_old_files_are_known_by_name(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    written(tmp_path / "llama", LLAMA_LIKE)
    change(tmp_path / "llama", model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    read_weights(tmp_path / "llama", LLAMA_LIKE, LLAMA)
    written(tmp_path, GPT2_LIKE)
    causal = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    change(tmp_path, transformer__h__0__attn__bias=causal, transformer__h__1__attn__masked_bias=torch.tensor(-1e4))
    read_weights(tmp_path, GPT2_LIKE, GPT2)
    change(tmp_path, transformer__h__0__attn__scale=torch.ones(1))
    assert "not wanted  transformer.h.0.attn.scale" in listed(tmp_path, GPT2_LIKE)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_a_pickle_is_never_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n")
    told = listed(tmp_path, LLAMA_LIKE)
    assert name in told and "safetensors" in told and "save_pretrained" in told


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert f"a folder with {SINGLE}" in listed(tmp_path, LLAMA_LIKE)
