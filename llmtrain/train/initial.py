"""What a run begins with when `model.init_from` names another run: its weights and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.paths import user_path
from llmtrain.config.typed_data import RunTokenizerConfig, TokenizerConfig
from llmtrain.data.tokenizer import Tokenizer, load_tokenizer
from llmtrain.train.engine_native import MODEL_PREFIX
from llmtrain.train.run_folder import RunFolder, existing_run_folder


@dataclass(frozen=True)
class InitialWeights:
    """The model of a checkpoint, without what an optimizer added to it."""

    tensors: dict[str, Tensor]
    """By parameter name, fp32 on the CPU; each tied tensor once."""
    step: int


def initial_weights(path: Path) -> InitialWeights:
    """The weights in the newest good checkpoint of a run folder.

    Raises:
        StorageError: no run folder, or no checkpoint in it that can be read.
    """
    loaded = CheckpointStore(existing_run_folder(path).checkpoints, keep=1).load(prefix=MODEL_PREFIX)
    return InitialWeights(model_tensors(loaded.tensors), loaded.step)


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
