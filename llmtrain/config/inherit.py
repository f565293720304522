"""What a run takes over from the run whose weights it begins with: the shape of the model and the marks around its texts,
wherever nothing else sets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmtrain.config.declare import AUTO
from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.files import Document, Setting, read_document
from llmtrain.config.paths import user_path
from llmtrain.config.values import Raw, show

KEY = "model.init_from"
RUN_CONFIG = "config.yaml"
"""The file of a run folder that holds its resolved config."""
INHERITED = "model."
MARKS = ("data.bos", "data.eos")
"""Belong to the tokenizer: a model sees what it was trained with."""
WITHOUT_MARKS = ("synthetic", "tokens")
"""Kinds of data that no marks are put into."""


def inherited(settings: Sequence[Setting]) -> Document:
    """The model settings of the folder that the last `model.init_from` among `settings` names; nothing where none does.

    With its tokenizer (no `tokenizer.kind` set) come `data.bos` and `data.eos`. They are the weakest of all settings. With learned positions `model.max_positions=auto` stands for the sequence length of that run
    and not for this one's: a table has the rows it has.
    """
    chosen = [setting for setting in settings if setting.key == KEY]
    if not chosen or chosen[-1].value is None:
        return Document()
    name, origin = show(chosen[-1].value), chosen[-1].origin
    try:
        path = user_path(name, f"{KEY}={name}") / RUN_CONFIG
    except ConfigError as error:
        return Document(problems=list(error.problems))
    if not path.is_file():
        rule = f"not a run folder: it has no {RUN_CONFIG}"
        cure = "a folder that training or `llmtrain convert hf:FOLDER runs/NAME` has made"
        return Document(problems=[Problem(f"{KEY}={name}", rule, cure, origin)])
    return _inheritance(path, MARKS if _takes_marks(settings) else ())


def _takes_marks(settings: Sequence[Setting]) -> bool:
    """Whether the tokenizer comes from the other run, and text goes through it."""
    last = {setting.key: show(setting.value) for setting in settings if setting.value is not None}
    return last.get("tokenizer.kind", AUTO) == AUTO and last.get("data.kind") not in WITHOUT_MARKS


def _inheritance(path: Path, marks: Sequence[str]) -> Document:
    document = read_document(path, str(path), "")
    values = {setting.key: setting for setting in document.settings}
    settings = [setting for setting in document.settings if setting.key.startswith(INHERITED) and setting.key != KEY]
    settings += [values[key] for key in marks if key in values]
    length, position = values.get("data.sequence_length"), values.get("model.position")
    if length is not None and position is not None and show(position.value) == "learned":
        settings = [_with_rows(setting, show(length.value)) for setting in settings]
    return Document(settings=settings, problems=[found for found in document.problems if found.what.startswith(INHERITED)])


def _with_rows(setting: Setting, rows: str) -> Setting:
    is_open = setting.key == "model.max_positions" and show(setting.value) == AUTO
    return replace(setting, value=Raw(rows)) if is_open else setting
