"""Trainings from a composed config to a finished run folder. Calling the package itself trains: `llmtrain.train(composed)`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    # A function `train` in llmtrain/__init__.py would be replaced by this package as soon as anything imported a module of it.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `llmtrain.train.api.train`."""
        from llmtrain.train.api import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Train
