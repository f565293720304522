"""Between Hugging Face folders and run folders."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llmtrain.checkpoint.files import Files, storage_error
from llmtrain.checkpoint.hf_config import HfModel, in_their_words, read_config, write_config
from llmtrain.checkpoint.hf_families import TOKEN_KEYS, family_of
from llmtrain.checkpoint.hf_weights import read_weights, write_weights
from llmtrain.checkpoint.staging import refuse_existing, staged_folder
from llmtrain.checkpoint.store import CheckpointStore, Loaded, match_tensors
from llmtrain.config import schema
from llmtrain.config.compose import config_from_wire
from llmtrain.config.errors import ConfigError, ExitCode, Problem, StorageError
from llmtrain.config.typed import AccumulationConfig, ConvertConfig, LaunchConfig, ModelConfig
from llmtrain.config.typed_data import DataConfig, SyntheticData, TokenData
from llmtrain.data.tokenizer import Tokenizer, load_tokenizer
from llmtrain.data.tokenizer_export import huggingface_files
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.plan import Plan
from llmtrain.plan.shapes import num_parameters, parameter_shapes
from llmtrain.train.engine_native import MODEL_PREFIX
from llmtrain.train.foreign_tokenizer import (
    FOLDER,
    ForeignTokenizer,
    adds_bos,
    read_foreign_tokenizer,
    with_bos,
    write_files,
)
from llmtrain.train.initial import model_tensors
from llmtrain.train.machine import detect_machine
from llmtrain.train.origin import origin_of
from llmtrain.train.run_folder import Opening, RunFolder, Start, describe_environment, existing_run_folder
from llmtrain.train.state import TrainState

CONFIG, GENERATION = "config.json", "generation_config.json"
LONGEST_ROW = 1024
"""Tokens of a row when an imported model is scored, unless it is made for shorter texts or the command says another number."""

Progress = Callable[[str], None]


def import_folder(source: Path, target: Path, progress: Progress, files: Files = Files()) -> dict[str, Any]:
    """Make a run folder at step 0 of a Hugging Face folder.

    Returns:
        What was written, for people and programs.

    Raises:
        ConfigError: a setting of the model that llmtrain does not have, or a target that is there already.
        DataError, StorageError: tokenizer or weights are missing, damaged or not those of the model; the target cannot be written.
    """
    refuse_existing(target)
    document = _read_json(source, CONFIG)
    model = read_config(document, str(source / CONFIG))
    rows = model.section["vocab_size"]
    tokenizer = read_foreign_tokenizer(source, vocab_size=rows, eos_id=_first_end(document, rows))
    wire = _wire(model, tokenizer, target)
    try:
        plan = _plan(wire, tokenizer.tokenizer)
    except ConfigError as error:
        told = [in_their_words(problem, model.family, str(source / CONFIG)) for problem in error.problems]
        raise ConfigError(*told) from error
    progress("reading the weights")
    weights = read_weights(source, plan.model, model.family)
    progress("writing the run folder")
    with staged_folder(target, files) as staging:
        folder = RunFolder(staging, files)
        folder.create()
        words = ("convert", f"hf:{source}", str(target))
        environment = describe_environment(plan, plan.device, [(platform.node(), plan.threads)])
        folder.record_start(wire, words, plan, environment, Opening(Start.FRESH, (), ""))
        _keep_for_an_export(folder, source, model, tokenizer)
        state = {"train": TrainState().to_dict(), "data_fingerprint": "", "tokenizer": tokenizer.tokenizer.to_json()}
        tensors = {MODEL_PREFIX + name: tensor for name, tensor in weights.items()}
        CheckpointStore(folder.checkpoints, keep=1, files=files).save(0, tensors, state)
        folder.write_status(int(ExitCode.DONE), 0, f"imported from {source}")
    return {
        "from": str(source),
        "to": str(target),
        **_described(plan.model, model.family.model_type),
        "tokenizer_files": list(tokenizer.files),
        "tokenizer_tokens": tokenizer.tokenizer.vocab_size,
        "left_out": [f"{key}={value}" for key, value in model.dropout.items()],
    }


def _keep_for_an_export(folder: RunFolder, source: Path, model: HfModel, tokenizer: ForeignTokenizer) -> None:
    """Put into a run folder what its weights and config do not tell."""
    if tokenizer.files:
        folder.files.make_folder(folder.path / FOLDER)
        write_files(folder.path / FOLDER, tokenizer.files, folder.files)
    folder.write_imported(
        {
            "source": source.absolute().name,
            "model_type": model.family.model_type,
            "config": model.kept,
            "generation_config": _read_json(source, GENERATION) if (source / GENERATION).is_file() else None,
            "tokenizer_fingerprint": tokenizer.tokenizer.fingerprint,
            "tokenizer_files": list(tokenizer.files),
        }
    )


def _first_end(document: Mapping[str, Any], vocab_size: int) -> int | None:
    """The token that ends a text in a folder without tokenizer: the first one named that the vocabulary has."""
    named = document.get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    return next((one for one in ids if isinstance(one, int) and not isinstance(one, bool) and 0 <= one < vocab_size), None)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        document = json.loads(Files().read(folder / name))
    except (FileNotFoundError, NotADirectoryError) as error:
        rule = f"a Hugging Face folder holds {name}; nothing is downloaded"
        cure = "the folder that `save_pretrained` or `hf download NAME --local-dir FOLDER` has made"
        raise ConfigError(Problem(f"no {folder / name}", rule, cure)) from error
    except OSError as error:
        raise storage_error(Files(), error, "read", folder / name) from error
    except ValueError as error:
        raise StorageError(Problem(f"cannot read {folder / name}", f"no JSON: {error}")) from error
    if not isinstance(document, dict):
        raise StorageError(Problem(f"cannot read {folder / name}", "no JSON object"))
    return document


def _wire(model: HfModel, tokenizer: ForeignTokenizer, target: Path) -> dict[str, Any]:
    """The config of the run folder: the model's shape, its tokenizer, fp32, and otherwise defaults."""
    target = target.absolute()
    keys = {
        "run.name": target.name,
        "run.dir": str(target.parent),
        **{f"model.{key}": value for key, value in model.section.items()},
        "data.sequence_length": min(LONGEST_ROW, model.section["max_positions"]),
        "precision.kind": "fp32",
        **tokenizer.settings(target),
    }
    config = schema.Config()
    for dotted, value in keys.items():
        *path, leaf = dotted.split(".")
        section: Any = config
        for name in path:
            section = getattr(section, name)
        setattr(section, leaf, value)
    return asdict(config)


def _plan(wire: Mapping[str, Any], tokenizer: Tokenizer) -> Plan:
    """The plan of an imported folder, of which only the model and the precision are ever read."""
    alone = AccumulationConfig(global_batch_size=1, global_batch_tokens=None, micro_batch_size=1)
    config = replace(config_from_wire(wire), accumulation=alone)
    machine = detect_machine(LaunchConfig(nproc=None, device="cpu", threads=None))
    return make_plan(config, machine, vocab_size=tokenizer.vocab_size)


def _described(model: ModelConfig, model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "parameters": num_parameters(model),
        "layers": model.num_layers,
        "dim": model.dim,
        "vocab_size": model.vocab_size,
    }


@dataclass(frozen=True)
class _Origin:
    """What the Hugging Face folder that a run goes back to had beside its weights."""

    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tokenizer_files: dict[str, bytes]


def export_run(run: Path, target: Path, convert: ConvertConfig, progress: Progress, files: Files = Files()) -> dict[str, Any]:
    """Make a Hugging Face folder of a checkpoint.

    Returns:
        What was written, for people and programs.

    Raises:
        ConfigError: no class of the transformers library computes the model, no such checkpoint, weights beyond the range of
            `convert.dtype`, or a target that is there already.
        StorageError: no run, a damaged checkpoint, or a target that cannot be written.
    """
    refuse_existing(target)
    folder = existing_run_folder(run)
    wire = folder.read_config()
    assert wire is not None, "existing_run_folder has seen config.yaml"
    config = config_from_wire(wire)
    if f"attention.{config.attention_backend}" in config.plugins:
        rule = "its attention is that of a plugin, which no class of the transformers library computes"
        raise ConfigError(Problem(f"{run}: attention.backend={config.attention_backend}", rule))
    model = config.model
    family = family_of(model)
    progress("loading the checkpoint")
    loaded = _load(folder, convert.step)
    weights, tokenizer = model_tensors(loaded.tensors), load_tokenizer(loaded.state["tokenizer"])
    model = replace(model, vocab_size=model.vocab_size or tokenizer.vocab_size)
    wanted = {name: torch.empty(shape, device="meta") for name, shape in parameter_shapes(model).items()}
    match_tensors(wanted, weights, "weights", cure="the config.yaml that the run was trained with")
    origin = _origin(folder, family.model_type, tokenizer, config.data)
    document = write_config(model, dtype=convert.dtype, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id, kept=origin.config)
    progress("writing the Hugging Face folder")
    with staged_folder(target, files) as staging:
        form = {"dtype": convert.dtype, "shard_bytes": convert.shard_bytes}
        names = write_weights(staging, weights, model, family, **form, files=files)
        texts = {CONFIG: _json(document), GENERATION: _json(origin.generation_config or _generation(tokenizer))}
        write_files(staging, {**texts, **origin.tokenizer_files}, files)
    return {
        "from": str(run),
        "to": str(target),
        "step": loaded.step,
        **_described(model, family.model_type),
        "dtype": convert.dtype,
        "weights": names,
        "tokenizer_files": list(origin.tokenizer_files),
        "tokenizer_tokens": tokenizer.vocab_size,
        "skipped": list(loaded.skipped),
    }


def _load(folder: RunFolder, step: int | None) -> Loaded:
    store = CheckpointStore(folder.checkpoints, keep=1)
    steps = store.published()
    if step is not None and step not in steps:
        there = f"checkpoints of {folder.path}: {', '.join(map(str, steps)) or 'none'}"
        cure = f"convert.step={min(steps, key=lambda one: abs(one - step))}" if steps else ""
        raise ConfigError(Problem(f"convert.step={step}", there, cure))
    return store.load(step, prefix=MODEL_PREFIX)


def _origin(folder: RunFolder, model_type: str, tokenizer: Tokenizer, data: DataConfig) -> _Origin:
    """What to give back: of the imported folder that the run is, or began with, as far as model and tokenizer are still its own.

    Args:
        data: of the run; whether its texts begin with a mark is what the exported tokenizer has to do.
    """
    adds = tokenizer.bos_id not in (None, tokenizer.eos_id) if data.bos is None else data.bos
    imported = origin_of(folder)
    document = None if imported is None else imported.read_imported()
    if imported is None or document is None or document["model_type"] != model_type:
        return _Origin({}, None, dict(huggingface_files(tokenizer, adds_bos=adds)))
    if document["tokenizer_fingerprint"] != tokenizer.fingerprint:
        config = {key: value for key, value in document["config"].items() if key not in TOKEN_KEYS}
        return _Origin(config, None, dict(huggingface_files(tokenizer, adds_bos=adds)))
    try:
        kept = {name: imported.files.read(imported.path / FOLDER / name) for name in document["tokenizer_files"]}
    except OSError as error:
        raise storage_error(imported.files, error, "read the tokenizer of", imported.path) from error
    # Token files have their marks or not, whatever data.bos says.
    is_text = not isinstance(data.source, TokenData | SyntheticData)
    if kept and is_text and adds_bos(kept, tokenizer) != adds:
        kept = with_bos(kept, tokenizer, adds)
    return _Origin(document["config"], document["generation_config"], kept)


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode() + b"\n"


def _generation(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return {key: value for key, value in ids.items() if value is not None}
