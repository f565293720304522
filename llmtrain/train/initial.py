"""What a run begins with when `model.init_from` names another run: its weights and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.declare import AUTO
from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.paths import user_path
from llmtrain.config.typed_data import RunTokenizerConfig, TokenizerConfig
from llmtrain.data.tokenizer import IdTokenizer, Tokenizer, load_tokenizer
from llmtrain.train.engine_native import MODEL_PREFIX
from llmtrain.train.run_changes import Change, find_changes
from llmtrain.train.run_folder import RunFolder, existing_run_folder

WITHOUT_EFFECT = ("model.init_from", "model.init_std", "model.depth_scaled_init", "model.dropout.")
"""Keys of the model, or their beginnings, that do not change what given weights compute."""


@dataclass(frozen=True)
class InitialWeights:
    """The model of a checkpoint, without what an optimizer added to it."""

    tensors: dict[str, Tensor]
    """By parameter name, fp32 on the CPU; each tied tensor once."""
    step: int
    tokenizer: Tokenizer
    """That they were trained with."""


def initial_weights(path: Path) -> InitialWeights:
    """The weights in the newest good checkpoint of a run folder.

    Raises:
        StorageError: no run folder, or no checkpoint in it that can be read.
    """
    loaded = CheckpointStore(existing_run_folder(path).checkpoints, keep=1).load(prefix=MODEL_PREFIX)
    return InitialWeights(model_tensors(loaded.tensors), loaded.step, load_tokenizer(loaded.state["tokenizer"]))


def model_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a checkpoint that belong to the model, by parameter name."""
    return {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(MODEL_PREFIX)}


def run_tokenizer(config: TokenizerConfig, folder: RunFolder) -> TokenizerConfig | Tokenizer:
    """The tokenizer section; where it stands for that of another run, the tokenizer itself.

    A run that has saved something has it in its own checkpoint, whatever became of the other run.

    Raises:
        ConfigError: the other run has none.
        StorageError: it cannot be read.
    """
    if not isinstance(config, RunTokenizerConfig):
        return config
    setting = f"model.init_from={config.path}"
    for place in (folder.path, user_path(config.path, setting)):
        state = CheckpointStore(RunFolder(place).checkpoints, keep=1).newest_state()
        if state is not None:
            return load_tokenizer(state["tokenizer"])
    raise ConfigError(Problem(setting, "this run has no checkpoint, and so no tokenizer", "name a run that was saved"))


def check_tokenizer(initial: InitialWeights, tokenizer: Tokenizer, *, keep_going: bool, warn: Callable[[str], None]) -> None:
    """Compare the tokenizer of a run with the one that its first weights were trained with; plain ids may be those of any.

    Args:
        keep_going: `run.on_change=continue`.

    Raises:
        ConfigError: they differ, so that every row of the embedding stands for another token.
    """
    if initial.tokenizer.fingerprint == tokenizer.fingerprint or isinstance(initial.tokenizer, IdTokenizer):
        return
    if isinstance(tokenizer, IdTokenizer):
        return
    rule = "the weights of model.init_from were trained with another one: their embedding has other tokens in its rows"
    if not keep_going:
        cure = "leave the tokenizer section out, or run.on_change=continue"
        raise ConfigError(Problem(f"another tokenizer ({tokenizer.vocab_size:,} tokens)", rule, cure))
    warn(f"another tokenizer: {rule}")


def overridden(before: Mapping[str, Any], wire: Mapping[str, Any]) -> list[Change]:
    """Keys of the model that would have been inherited and are set to something else, where that changes the function.

    Args:
        before: config of the run whose weights are taken.
        wire: config of this run.
    """
    inherited = dict(before["model"])
    if inherited.get("position") == "learned" and inherited.get("max_positions") == AUTO:
        inherited["max_positions"] = before["data"]["sequence_length"]
    changes = find_changes({**wire, "model": inherited}, wire)
    return [change for change in changes if not change.key.startswith(WITHOUT_EFFECT)]
