"""Tokens per second of the trainer over those of a bare loop that runs the same operations in the same process.

    python scripts/trainer_overhead.py [--repeats 7] [--updates 20] [words of a config]

Both train the same model on the same batches. The trainer does all it does in a run (data by sample index, norm, decision, clipping,
records to a file, console lines, counters); the bare loop does forward, loss, backward, clip and AdamW on batches read beforehand.
Which of two stretches comes first matters by several per cent, so each repeat is trainer, bare, bare, trainer; printed are the
ratio of each repeat and the median.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import statistics
import tempfile
import time
from pathlib import Path

import torch

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.compose import compose_config
from llmtrain.config.typed import Config
from llmtrain.data.corpus import Corpus, build_corpus
from llmtrain.data.loader import Batch
from llmtrain.dist.ranks import alone
from llmtrain.dist.runtime import configure_process
from llmtrain.metrics.console import PlainConsole
from llmtrain.metrics.memory import NoLedger
from llmtrain.metrics.meters import DeviceMeter
from llmtrain.metrics.sinks import open_sink
from llmtrain.metrics.throughput import Throughput
from llmtrain.metrics.trackers import Trackers
from llmtrain.ops.cross_entropy import build_loss
from llmtrain.optim.build import build_optimizer
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.plan import Plan
from llmtrain.train.assemble import build_engine
from llmtrain.train.machine import detect_machine
from llmtrain.train.reporter import Reporter
from llmtrain.train.signals import StopSignals
from llmtrain.train.state import TrainState
from llmtrain.train.trainer import Trainer

WARM_UP = 5


def trainer_seconds(config: Config, plan: Plan, corpus: Corpus, updates: int, folder: Path) -> float:
    """Seconds of `updates` updates by the Trainer, after `WARM_UP` more."""
    world = alone()
    engine = build_engine(config, plan, NoLedger(), world)
    device = torch.device(plan.device)
    console = PlainConsole(io.StringIO())
    sink = open_sink(folder / "metrics.jsonl")
    reporter = Reporter(
        plan=plan,
        console=console,
        sink=sink,
        trackers=Trackers(console.warn),
        ledger=NoLedger(),
        device_meter=DeviceMeter(device),
        comm_meter=world.collectives.meter,
        peak_flops=1.0,
        throughput=Throughput(),
    )
    state = TrainState()
    store = CheckpointStore(folder / "checkpoints", keep=1)
    console.start_training(first_step=0, total_steps=updates, log_every=10)
    seconds = 0.0
    for stop_after in (WARM_UP, WARM_UP + updates):
        train = dataclasses.replace(config.train, stop_after=stop_after, eval_every=0)
        checkpoint = dataclasses.replace(config.checkpoint, every=0)
        trainer = _NoSave(
            plan=plan,
            train=train,
            checkpoint=checkpoint,
            engine=engine,
            corpus=corpus,
            store=store,
            state=state,
            reporter=reporter,
            stop=StopSignals(),
            world=world,
        )
        began = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - began
    console.close()
    sink.close()
    return seconds


class _NoSave(Trainer):
    """The bare loop saves nothing, so the trainer does not either."""

    def _save(self) -> None:
        pass


def bare_seconds(config: Config, plan: Plan, corpus: Corpus, updates: int) -> float:
    """Seconds of `updates` updates of a loop with nothing around them, after `WARM_UP` more."""
    engine = build_engine(config, plan, NoLedger(), alone())
    model, loss_function = engine.model, build_loss(plan.loss, plan.precision)
    optimizer = build_optimizer(config.optimizer, model.named_parameters())
    batches = [_update_batches(plan, corpus, number) for number in range(WARM_UP + updates)]
    began = 0.0
    for number, micro_batches in enumerate(batches):
        if number == WARM_UP:
            began = time.perf_counter()
        num_targets = sum(batch.num_targets for batch in micro_batches)
        for batch in micro_batches:
            hidden = model(batch.tokens, batch.positions, batch.document_ids)
            loss = loss_function(hidden.flatten(0, 1), model.head_weight, batch.targets.flatten())
            (loss / num_targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm or 1e9)
        optimizer.step(1e-4)
        optimizer.zero_grad()
        loss.item()
    return time.perf_counter() - began


def _update_batches(plan: Plan, corpus: Corpus, number: int) -> list[Batch]:
    size, count = plan.batch.micro_batch_size, plan.batch.num_microbatches
    first = number * plan.batch.global_batch_size
    return [corpus.train.batch(first + index * size, size).to(plan.device) for index in range(count)]


def _in_new_folder(config: Config, plan: Plan, corpus: Corpus, updates: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return trainer_seconds(config, plan, corpus, updates, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--updates", type=int, default=20)
    options, words = parser.parse_known_args()
    config = compose_config([f"train.steps={WARM_UP + options.updates}", *words]).config
    corpus = build_corpus(config.data, config.tokenizer, seed=0, vocab_size=config.model.vocab_size, progress=lambda text: None)
    plan = make_plan(config, detect_machine(config.launch), vocab_size=corpus.tokenizer.vocab_size)
    configure_process(threads=plan.threads, deterministic=False)
    tokens = options.updates * plan.batch.tokens_per_step
    print("trainer tok/s     bare tok/s    ratio")
    ratios = []
    for _ in range(options.repeats):
        trainer = _in_new_folder(config, plan, corpus, options.updates)
        bare = bare_seconds(config, plan, corpus, options.updates) + bare_seconds(config, plan, corpus, options.updates)
        trainer += _in_new_folder(config, plan, corpus, options.updates)
        ratios.append(bare / trainer)
        print(f"{2 * tokens / trainer:13,.0f}  {2 * tokens / bare:13,.0f}  {ratios[-1]:7.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f}, lowest {min(ratios):.3f}, highest {max(ratios):.3f}")


if __name__ == "__main__":
    main()
