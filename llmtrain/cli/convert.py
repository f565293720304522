"""`llmtrain convert hf:FOLDER runs/NAME` and `llmtrain convert runs/NAME hf:FOLDER`: a model from elsewhere as a run, and a run for elsewhere."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.request import compose
from llmtrain.cli.session import open_console
from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.paths import user_path

if TYPE_CHECKING:
    from llmtrain.metrics.console import Console

MARK = "hf:"


def run(arguments: Arguments) -> int:
    """Convert, and say what was written and what to type next."""
    config = compose(arguments).config
    source, target = arguments.folders
    exports = str(target).startswith(MARK)
    if exports == str(source).startswith(MARK):
        raise ConfigError(_which_is_foreign(source, target))
    if not exports:
        _refuse_export_keys(arguments)
    with open_console(config.output) as console:
        console.status(f"converting {source}")
        from llmtrain.train.convert import export_run, import_folder

        if exports:
            folder = _foreign(target)
            result = export_run(source, folder, config.convert, console.status)
            _tell(console, "exported", result)
            load = f"from transformers import AutoModelForCausalLM as M; print(M.from_pretrained({json.dumps(str(folder))}))"
            console.next([shlex.join(["python", "-c", load])])
        else:
            result = import_folder(_foreign(source), target, console.status)
            _tell(console, "imported", result)
            console.next(_uses(target, has_text=bool(result["tokenizer_files"])))
        console.document(result)
    return 0


def _which_is_foreign(source: Path, target: Path) -> Problem:
    rule = f"one of the two folders is a Hugging Face folder and marked with {MARK}, the other a run folder"
    ways = {
        f"llmtrain convert {MARK}{_bare(source)} {_bare(target)}": (_bare(source) / "config.json").is_file(),
        f"llmtrain convert {_bare(source)} {MARK}{_bare(target)}": (_bare(source) / "config.yaml").is_file(),
    }
    cure = " or ".join([way for way, fits in ways.items() if fits] or ways)
    return Problem(f"{source} {target}", rule, cure)


def _bare(folder: Path) -> Path:
    return Path(str(folder).removeprefix(MARK))


def _foreign(folder: Path) -> Path:
    """The folder behind the mark."""
    text = str(folder).removeprefix(MARK)
    if not text:
        raise ConfigError(Problem(str(folder), f"{MARK} is followed by the folder", f"{MARK}FOLDER"))
    return user_path(text, str(folder))


def _refuse_export_keys(arguments: Arguments) -> None:
    """An import has no checkpoint to choose, and its weights are always kept in fp32."""
    words = [word for word in arguments.words if word.lstrip("+").startswith("convert.")]
    if words:
        raise ConfigError(*(Problem(word, "only read when a run folder is exported", "leave it out") for word in words))


def _uses(run: Path, *, has_text: bool) -> list[str]:
    """What one would type after an import."""
    begin = ["llmtrain", f"model.init_from={run}", f"run.name={run.name}-tuned"]
    if not has_text:
        return [shlex.join([*begin, "data=tokens", "data.path=FILE"])]
    return [shlex.join(begin), shlex.join(["llmtrain", "generate", str(run), "generate.prompt=Once upon a time"])]


def _tell(console: Console, label: str, result: dict[str, Any]) -> None:
    for reason in result.get("skipped", ()):
        console.warn(f"checkpoint passed over: {reason}")
    shown = {name: ", ".join(value) if isinstance(value, list) else value for name, value in result.items() if value != []}
    width = max(map(len, shown))
    lines = [
        f"{name:{width}}  {value:,}" if isinstance(value, int) else f"{name:{width}}  {value}" for name, value in shown.items()
    ]
    console.block(label, lines)
