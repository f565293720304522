"""Measures what the storage ledger costs: time of an update with it over time of the same update without.

    python scripts/ledger_cost.py [--repeats 15] [--cpu-time] [overrides of the config …]

Both kinds of update run on one engine in one process, alternating, on synthetic tokens. Printed: the median ratio of neighbours,
the ratio of the two fastest, and the quartiles, as the clock of a shared machine is noisy.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from llmtrain.config.compose import compose_config
from llmtrain.data.corpus import build_corpus
from llmtrain.dist.ranks import alone
from llmtrain.dist.runtime import configure_process
from llmtrain.metrics.memory import MemorySummary, StorageLedger
from llmtrain.metrics.throughput import Clock
from llmtrain.plan.make_plan import make_plan
from llmtrain.train.accumulate import microbatch_ranges
from llmtrain.train.assemble import build_engine
from llmtrain.train.machine import detect_machine

WARMUP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of the storage ledger")
    parser.add_argument("--repeats", type=int, default=15, help="updates of each kind")
    parser.add_argument("--cpu-time", action="store_true", help="time of the CPU, for a busy machine; with launch.threads=1")
    parser.add_argument("words", nargs="*", help="overrides of the config, e.g. model=small +recompute=full")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    seconds, summary = measure(["data=synthetic", *arguments.words], arguments.repeats, clock)
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"update without {min(seconds['off']) * 1e3:.1f} ms, with {min(seconds['on']) * 1e3:.1f} ms (fastest of {len(ratios)} each)"
    )
    print(
        f"ratio median {middle:.3f} (quartiles {low:.3f} to {high:.3f}), of the fastest {min(seconds['on']) / min(seconds['off']):.3f}"
    )
    print(f"peak {summary.peak_bytes:,} bytes: {dict(summary.at_peak)}")


def measure(words: list[str], repeats: int, clock: Clock) -> tuple[dict[str, list[float]], MemorySummary]:
    """Seconds of each update with the ledger on and off, and what it saw."""
    config = compose_config(words).config
    corpus = build_corpus(config.data, config.tokenizer, seed=0, vocab_size=config.model.vocab_size, progress=print)
    plan = make_plan(config, detect_machine(config.launch), vocab_size=corpus.tokenizer.vocab_size)
    configure_process(threads=plan.threads, deterministic=False)
    ledger = StorageLedger(torch.device(plan.device))
    engine = build_engine(config, plan, ledger, alone())
    microbatches = [corpus.train.batch(part.first, part.count) for part in microbatch_ranges(plan.batch, 0)]
    num_targets = sum(batch.num_targets for batch in microbatches)
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for update in range(1, repeats + WARMUP + 1):
        before = clock()
        engine.train_step(update, microbatches, num_targets)
        between = clock()
        with ledger.window():
            engine.train_step(update, microbatches, num_targets)
        after = clock()
        if update > WARMUP:
            seconds["off"].append(between - before)
            seconds["on"].append(after - between)
    summary = ledger.summary()
    assert summary is not None
    return seconds, summary


if __name__ == "__main__":
    main()
