"""Trainings from a composed config to a finished run folder. Calling the package itself trains: `llmtrain.train(composed)`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.config.compose import Composed
    from llmtrain.config.errors import ExitCode
    from llmtrain.metrics.console import Console


class TrainPackage(ModuleType):
    """This package: its modules are attributes, as of any package, and it can be called."""

    # A function `train` in llmtrain/__init__.py would be replaced by this package as soon as anything imported a module of it.
    def __call__(self, composed: Composed, console: Console | None = None) -> ExitCode:
        """See `llmtrain.train.api.train`."""
        from llmtrain.train.api import train

        return train(composed, console)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        """Pickled by name, as functions are."""
        return import_module, (__name__,)


sys.modules[__name__].__class__ = TrainPackage
