"""llmtrain: pretrain language models, and know what fits, what it costs and whether it is right.

From Python: `compose_config` makes a config from words, `train` trains it, `load_run` gives back the model of a run folder; see
docs/python.md. The names are looked up when they are first used, so `import llmtrain` brings no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.config.compose import compose_config
    from llmtrain.config.errors import LlmtrainError
    from llmtrain.model.transformer import Transformer
    from llmtrain.plan.make_plan import make_plan
    from llmtrain.train import TrainPackage
    from llmtrain.train.api import load_run
    from llmtrain.train.machine import detect_machine

    train: TrainPackage

__version__ = "0.1.0"
__all__ = [
    "LlmtrainError",
    "Transformer",
    "__version__",
    "compose_config",
    "detect_machine",
    "load_run",
    "make_plan",
    "train",
]

_HOMES = {
    "LlmtrainError": "llmtrain.config.errors",
    "Transformer": "llmtrain.model.transformer",
    "compose_config": "llmtrain.config.compose",
    "detect_machine": "llmtrain.train.machine",
    "load_run": "llmtrain.train.api",
    "make_plan": "llmtrain.plan.make_plan",
}
"""Where each name is defined; `train` is the package of that name, which can be called."""


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("llmtrain.train")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
