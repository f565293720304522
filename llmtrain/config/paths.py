"""Paths as people type them: `~` and `~name` stand for home folders."""

from __future__ import annotations

from pathlib import Path

from llmtrain.config.errors import ConfigError, Problem


def user_path(text: str, setting: str, cure: str = "write the path without `~`") -> Path:
    """`text` as a path, a leading `~` or `~name` replaced by the home folder it stands for.

    Args:
        text: what was typed.
        setting: where it was typed, for the message, e.g. `data.path=~nobody/text`.
        cure: what to do where there is no such home folder.

    Raises:
        ConfigError: nobody of that name has a home folder here (or, for `~` alone, this process has none).
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        first = Path(text).parts[0]
        raise ConfigError(Problem(setting, f"`{first}` stands for a home folder, and there is none here", cure)) from error
