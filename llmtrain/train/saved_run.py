"""A run folder looked at again: score its validation text, or let its model write."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.compose import Composed, config_from_wire
from llmtrain.config.errors import ConfigError, DataError, Problem
from llmtrain.config.typed import AccumulationConfig, Config, LaunchConfig, PositionKind
from llmtrain.config.typed_data import (
    DataConfig,
    LearntTokenizerConfig,
    RecordData,
    StoredTokenizerConfig,
    SyntheticData,
    TextData,
    TokenData,
)
from llmtrain.data.corpus import Corpus, build_corpus
from llmtrain.data.tokenizer import IdTokenizer, Tokenizer, load_tokenizer
from llmtrain.dist.runtime import configure_process
from llmtrain.model.generate import generate
from llmtrain.model.transformer import Transformer
from llmtrain.ops.cross_entropy import build_score
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.plan import Plan
from llmtrain.train.assemble import build_model
from llmtrain.train.engine_native import MODEL_PREFIX, copy_tensors
from llmtrain.train.forward_backward import evaluate_batches, rows_told
from llmtrain.train.initial import model_tensors
from llmtrain.train.machine import detect_machine
from llmtrain.train.memory_errors import explained_memory_errors
from llmtrain.train.origin import end_ids
from llmtrain.train.run_folder import existing_run_folder
from llmtrain.train.signals import stop_signals_raise

LARGEST_EXPONENT = math.log(sys.float_info.max)


@dataclass(frozen=True)
class SavedRun:
    """A trained model with what is needed to use it."""

    config: Config
    """That of the run."""
    plan: Plan
    model: Transformer
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    """Tokens that end a text."""
    step: int
    data_fingerprint: str
    """Of what it was trained on; empty for an imported model."""
    skipped: tuple[str, ...]
    """Newer checkpoints that are damaged."""


def load_run(path: Path, launch: LaunchConfig, step: int | None = None) -> SavedRun:
    """Load the model of a run folder in the precision it was trained in.

    Args:
        path: the run folder.
        launch: device and threads to use now.
        step: the checkpoint; None = the newest good one.

    Raises:
        ConfigError: no such checkpoint.
        StorageError: no run, a damaged checkpoint, or tensors that do not fit the config.
    """
    folder = existing_run_folder(path)
    wire = folder.read_config()
    assert wire is not None, "existing_run_folder has seen config.yaml"
    store = CheckpointStore(folder.checkpoints, keep=1)
    steps = store.published()
    if step is not None and step not in steps:
        there = f"checkpoints of {path}: {', '.join(map(str, steps)) or 'none'}"
        raise ConfigError(Problem(f"step {step}", there, f"{min(steps, key=lambda one: abs(one - step))}" if steps else ""))
    loaded = store.load(step, prefix=MODEL_PREFIX)
    tokenizer = load_tokenizer(loaded.state["tokenizer"])
    # One sequence at a time: whether the training batch would fit on this machine is not asked.
    alone = AccumulationConfig(global_batch_size=1, global_batch_tokens=None, micro_batch_size=1)
    config = replace(config_from_wire(wire), launch=launch, precision=folder.read_precision(), accumulation=alone)
    plan = make_plan(config, detect_machine(launch), vocab_size=tokenizer.vocab_size, training=False)
    configure_process(threads=plan.threads, deterministic=config.train.deterministic)
    model = build_model(plan, seed=config.run.seed)
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    copy_tensors(model_tensors(loaded.tensors), own, "weights")
    return SavedRun(
        config=config,
        plan=plan,
        model=model.eval(),
        tokenizer=tokenizer,
        eos_ids=end_ids(folder, tokenizer),
        step=loaded.step,
        data_fingerprint=loaded.state["data_fingerprint"],
        skipped=loaded.skipped,
    )


def evaluate_run(path: Path, composed: Composed, progress: Callable[[str], None]) -> dict[str, Any]:
    """Score a checkpoint on every validation token, or the first `evaluate.tokens`.

    Args:
        composed: this command's; `evaluate`, `launch`, `prepare` are read, and `data` where it names other text than the run's.

    Raises:
        ConfigError, StorageError: see `load_run`.
        DataError: no text there; or the run's own text is not what it was.
        StoppedError: SIGTERM, SIGUSR1 or SIGHUP came while text was prepared.
    """
    config = composed.config
    progress("loading the checkpoint")
    run = load_run(path, config.launch, config.evaluate.step)
    own_text, data = data_to_score(run, composed)
    # What was learnt from the text is found in the cache by the config; the checkpoint has every other tokenizer, whatever became of
    # the file it was read from.
    learnt = isinstance(run.config.tokenizer, LearntTokenizerConfig | StoredTokenizerConfig)
    tokenizer = run.config.tokenizer if own_text and learnt else run.tokenizer
    with stop_signals_raise():
        corpus = build_corpus(
            data,
            tokenizer,
            seed=run.config.run.seed,
            vocab_size=run.config.model.vocab_size,
            progress=progress,
            prepare=replace(run.config.prepare, path=None, workers=config.prepare.workers) if own_text else config.prepare,
        )
    if own_text and run.data_fingerprint not in ("", corpus.fingerprint):
        rule = "its validation text, tokenizer or packing is not what the run was trained with, so the loss would mean nothing"
        raise DataError(Problem(f"the data of {path} has changed", rule, "the text the run was started with"))
    progress("scoring the validation text")
    batches = corpus.validation.batches(config.evaluate.batch_size, config.evaluate.tokens)
    told = rows_told(progress, corpus.validation.num_scored_rows(config.evaluate.tokens))
    score = build_score(run.plan.loss, run.plan.precision)
    with explained_memory_errors(run.plan, cures=(f"evaluate.batch_size={max(1, config.evaluate.batch_size // 2)}",)):
        result = evaluate_batches(run.model, score, batches, torch.device(run.plan.device), told)
    document = {
        "run": str(path),
        "step": run.step,
        "data": _what_is_scored(data, corpus),
        "loss": result.loss,
        "perplexity": math.exp(result.loss) if result.loss < LARGEST_EXPONENT else math.inf,
        "targets": result.num_targets,
    }
    bits = corpus.bits_per_byte(result.loss)
    if bits is not None:
        document["bits_per_byte"] = bits
    if corpus.byte_frequency_bits is not None:
        document["byte_frequency_bits_per_byte"] = corpus.byte_frequency_bits
    return document


def _what_is_scored(data: DataConfig, corpus: Corpus) -> str:
    source = data.source
    whole = isinstance(source, TextData | RecordData | TokenData) and source.validation_path == source.path
    return f"all of {source.path}" if whole else corpus.summary


def data_to_score(run: SavedRun, composed: Composed) -> tuple[bool, DataConfig]:
    """Whether it is the run's own data that is scored, and the data.

    What the command does not say about `data` is as in the run. Files that it names are scored whole, unless it says what share of
    them is to be held out.

    Raises:
        ConfigError: rows longer than a model with learned positions can read.
    """
    asked, given = composed.config.data, {key.removeprefix("data.") for key in composed.origins if key.startswith("data.")}
    if not given:
        return True, run.config.data
    form = {name: getattr(asked, name) for name in ("sequence_length", "packing", "bos", "eos") if name in given}
    data = replace(run.config.data, **form)
    if given - set(form):
        source = asked.source
        if isinstance(source, TextData | RecordData | TokenData) and not given & {"validation_path", "validation_fraction"}:
            source = replace(source, validation_path=source.path)
        data = replace(data, source=source)
    rows = run.plan.model.max_positions
    if run.plan.model.position is PositionKind.LEARNED and data.sequence_length > rows:
        rule = f"at most the {rows} positions the model has learned"
        raise ConfigError(Problem(f"data.sequence_length={data.sequence_length}", rule, f"data.sequence_length={rows}"))
    return False, data


def generate_text(path: Path, config: Config) -> Iterator[str]:
    """The continuation of `generate.prompt`, in pieces as they come.

    Args:
        config: this command's; only `generate` and `launch` are read.

    Raises:
        ConfigError: see `load_run`; or the run's data is no text.
        StorageError: see `load_run`.
    """
    settings = config.generate
    run = load_run(path, config.launch, settings.step)
    if isinstance(run.config.data.source, SyntheticData) and run.data_fingerprint:
        raise ConfigError(Problem(f"{path} was trained on synthetic tokens", "there is no text to generate", "a run on text"))
    tokenizer = run.tokenizer
    prompt = prompt_ids(tokenizer, settings.prompt, bos=run.config.data.bos)
    # Numbers are kept apart, from those of the prompt too.
    gap = " " if isinstance(tokenizer, IdTokenizer) and settings.prompt[-1:].strip() else ""
    ids: list[int] = []
    shown = ""
    for token in generate(run.model, prompt, settings, eos_ids=run.eos_ids, vocab_size=tokenizer.vocab_size):
        ids.append(token)
        # A character may need several tokens: what ends in a replacement character is held back until it is complete.
        text = gap + tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}") and text.startswith(shown):
            yield text[len(shown) :]
            shown = text
    yield (gap + tokenizer.decode(ids))[len(shown) :] if ids else ""


def prompt_ids(tokenizer: Tokenizer, text: str, *, bos: bool | None) -> list[int]:
    """Ids of a prompt as documents of training begin: with a begin-of-text token where they have one (`data.bos`, None = auto).

    An empty prompt begins a text in any case: with the begin-of-text token, else with the end of the text before.
    """
    ids = [int(token) for token in tokenizer.encode(text)]
    framed = tokenizer.bos_id is not None and (tokenizer.bos_id != tokenizer.eos_id if bos is None else bos)
    if framed or not ids:
        first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        ids = [first, *ids] if first is not None else ids
    return ids
