"""Ways to see the effect of a key from outside: each trains or builds something small and returns what can be compared."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import run, run_words, saved

from llmtrain.cli.dispatch import dispatch
from llmtrain.config.compose import compose_config
from llmtrain.config.errors import LlmtrainError
from llmtrain.data import prepare
from llmtrain.data.corpus import build_corpus
from llmtrain.data.loader import ValidationLoader
from llmtrain.dist.ranks import alone
from llmtrain.dist.torch_private import TorchDispatchMode
from llmtrain.metrics.memory import NoLedger, StorageLedger
from llmtrain.metrics.tracker_wandb import WandbTracker
from llmtrain.plan.make_plan import make_plan
from llmtrain.train.assemble import build_engine
from llmtrain.train.forward_backward import PlainForwardBackward
from llmtrain.train.machine import detect_machine

BASE = ("train.steps=4", "accumulation.global_batch_size=4", "accumulation.micro_batch_size=4", "attention=reference")


@dataclass(frozen=True)
class Place:
    """Where a row works."""

    text: Path
    runs: Path

    def words(self, *words: str) -> tuple[str, ...]:
        return run_words(self.text, self.runs, "unused", *BASE, *words)

    def run(self, *words: str) -> tuple[Path, str]:
        """Train into a folder of its own name; (folder, what was printed)."""
        name = f"run-{len(list(self.runs.iterdir()))}"
        _, printed = run(*run_words(self.text, self.runs, name, *BASE, *words))
        return self.runs / name, printed


Observer = Callable[..., Any]


def engine_of(place: Place, words: tuple[str, ...], ledger: Any = None) -> tuple[Any, Any, Any]:
    config = compose_config(place.words(*words)).config
    corpus = build_corpus(
        config.data, config.tokenizer, seed=config.run.seed, vocab_size=config.model.vocab_size, progress=lambda text: None
    )
    plan = make_plan(config, detect_machine(config.launch), vocab_size=corpus.tokenizer.vocab_size)
    return build_engine(config, plan, ledger or NoLedger(), alone()), corpus, plan


def built(place: Place, *words: str) -> Any:
    """Names, shapes and sums of the initial weights."""
    engine, _, _ = engine_of(place, words)
    return [(name, tuple(p.shape), p.double().sum().item()) for name, p in engine.model.named_parameters()]


def update(engine: Any, corpus: Any, plan: Any, number: int) -> Any:
    size = plan.batch.micro_batch_size
    first = (number - 1) * plan.batch.global_batch_size
    batches = [corpus.train.batch(first + index * size, size) for index in range(plan.batch.num_microbatches)]
    return engine.train_step(number, batches, sum(batch.num_targets for batch in batches))


def computed(place: Place, *words: str) -> Any:
    """Losses, norms and weights of three updates."""
    engine, corpus, plan = engine_of(place, words)
    results = [update(engine, corpus, plan, number) for number in (1, 2, 3)]
    weights = [p.double().sum().item() for p in engine.model.parameters()]
    return [(r.loss, r.grad_norm, r.lr) for r in results], weights


def operations(place: Place, *words: str) -> Any:
    """How often each operation ran in one update, with the dtype of its result."""
    counts: Counter[str] = Counter()

    class Trace(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            counts[f"{func} {getattr(result, 'dtype', '')}"] += 1
            return result

    engine, corpus, plan = engine_of(place, words)
    with Trace():
        update(engine, corpus, plan, 1)
    return counts


def memory(place: Place, *words: str) -> Any:
    """Highest bytes of activations and of the loss in one update."""
    ledger = StorageLedger(torch.device("cpu"))
    engine, corpus, plan = engine_of(place, words, ledger)
    with ledger.window():
        update(engine, corpus, plan, 1)
    summary = ledger.summary()
    return summary.activations_peak_bytes, summary.loss_peak_bytes


def tokens(place: Place, *words: str) -> Any:
    """The first batch: ids, targets, positions."""
    _, corpus, _ = engine_of(place, words)
    batch = corpus.train.batch(0, 4)
    return [None if t is None else t.tolist() for t in (batch.tokens, batch.targets, batch.positions)]


def tokens_or_refusal(place: Place, *words: str) -> Any:
    """The first batch, or why there is none."""
    return refusal(lambda *more: tokens(place, *more), *words) or tokens(place, *words)


def records(place: Place, *words: str) -> Any:
    """Which steps were recorded, and the validation losses among them."""
    folder, _ = place.run(*words)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("val_loss")) for line in lines]


def first_loss(place: Place, *words: str) -> Any:
    """The loss before any update."""
    trained(place)
    folder, _ = place.run("train.steps=1", *words)
    return json.loads((folder / "metrics.jsonl").read_text())["loss"]


def tracked(place: Place, *words: str) -> Any:
    """What lies in the run folder besides its own files."""
    folder, _ = place.run(*words)
    return sorted(path.name for path in folder.iterdir())


def tracked_by(place: Place, *words: str) -> Any:
    """What Weights & Biases is started with; it is not started."""
    seen: list[Any] = []

    def send(self: WandbTracker, message: Any) -> None:
        seen.append({name: message["run"][name] for name in ("mode", "project", "entity", "group", "tags")})
        raise RuntimeError("seen enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WandbTracker, "send", send)
        place.run(*words)
    return seen


def prepared(place: Place, *words: str) -> Any:
    """Files of token folders that `prepare` leaves."""
    shutil.rmtree(place.text.parent / "tokens", ignore_errors=True)
    said = printed_by("prepare", "data=text", f"data.path={place.text}", f"data.cache_dir={place.runs / 'cache'}", *words)
    return sorted(path.name for path in (place.text.parent / "tokens").rglob("*")), "tokens" in said


def worker_processes(place: Place, *words: str) -> Any:
    """How many processes tokenize."""
    seen = []
    plain = prepare.make_shards

    def looking(settings: Any, units: Any, num_workers: int, report: Any) -> Any:
        seen.append(num_workers)
        return plain(settings, units, num_workers, report)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "make_shards", looking)
        prepared(place, f"prepare.path={place.text.parent / 'tokens'}", *words)
    return seen


def exported(place: Place, *words: str) -> Any:
    """Files, sizes and the first bytes of weights of an export."""
    target = place.text.parent / f"export-{len(list(place.text.parent.iterdir()))}"
    printed_by("convert", str(trained(place)), f"hf:{target}", *words)
    return [(path.name, path.stat().st_size, path.read_bytes()[-64:]) for path in sorted(target.glob("*.safetensors"))]


def checkpoints(place: Place, *words: str) -> Any:
    """Steps that are left on the disk."""
    folder, _ = place.run(*words)
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def printed_steps(place: Place, *words: str) -> Any:
    """Lines about steps that a log file gets."""
    _, printed = place.run(*words)
    return [line.split("  ")[0] for line in printed.splitlines() if line.startswith("step")]


def process_in_update(place: Place, *words: str) -> Any:
    """Settings of the process while an update runs."""
    seen = []
    plain = PlainForwardBackward.run

    def looking(self, microbatches, **keys):
        seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), gc.isenabled()))
        return plain(self, microbatches, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainForwardBackward, "run", looking)
        place.run(*words)
    torch.set_num_threads(1)
    return seen


def survives_bad_batches(place: Place, *words: str) -> Any:
    """Whether two bad batches in a row end the run."""
    plain, calls = PlainForwardBackward.run, iter(range(1, 100))

    def spoilt(self, microbatches, **keys):
        loss = plain(self, microbatches, **keys)
        return loss * float("nan") if next(calls) in (2, 3) else loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainForwardBackward, "run", spoilt)
        return refusal(lambda *more: place.run(*more), *words)


def refusal(action: Callable[..., Any], *words: str) -> str:
    """The message of what `action` refuses; empty when it does not."""
    try:
        action(*words)
    except LlmtrainError as error:
        return str(error)
    return ""


def refused(place: Place, *words: str) -> str:
    """Composing and looking at the machine."""
    return refusal(lambda *more: detect_machine(compose_config(place.words(*more)).config.launch), *words)


def changed_resume(place: Place, *words: str) -> str:
    """Resuming with another learning rate."""
    folder, _ = place.run("train.stop_after=2")
    again = run_words(place.text, place.runs, folder.name, *BASE, "optimizer.lr=0.5", *words)
    return refusal(run, *again)


def run_folders(place: Place, *words: str) -> Any:
    """Where the run folder is, below the parent of all."""
    before = set(place.runs.rglob("config.yaml"))
    run(*place.words(), *words)
    (made,) = set(place.runs.rglob("config.yaml")) - before
    return made.parent.relative_to(place.runs)


def cached_files(place: Place, *words: str) -> Any:
    """Where prepared tokens lie."""
    engine_of(place, words)
    return sorted(path.parents[1].name for path in place.runs.parent.rglob("train-00000.tokens"))


def trained(place: Place) -> Path:
    """A run folder with checkpoints at steps 2 and 4."""
    folder = place.runs / "trained"
    if not folder.exists():
        run(*run_words(place.text, place.runs, "trained", *BASE, "checkpoint.every=2", "optimizer.lr=0.03"))
        assert saved(folder).step == 4
    return folder


def printed_by(*words: str) -> str:
    """What a command prints on standard output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert dispatch([*words]) == 0
    return out.getvalue()


def command(verb: str) -> Observer:
    """What a verb on a run folder prints."""

    def observe(place: Place, *words: str) -> Any:
        return printed_by(verb, str(trained(place)), "launch.threads=1", *words)

    return observe


def scored_batches(place: Place, *words: str) -> Any:
    """Sizes of the batches that `evaluate` scores."""
    sizes = []
    plain = ValidationLoader.batches

    def looking(self, batch_size, max_tokens=None):
        for batch in plain(self, batch_size, max_tokens):
            sizes.append(len(batch.tokens))
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ValidationLoader, "batches", looking)
        command("evaluate")(place, *words)
    return sizes


evaluated, generated = command("evaluate"), command("generate")
