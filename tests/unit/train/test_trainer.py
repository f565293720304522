"""The trainer's cadence and what it does when something goes wrong, on whole small runs."""

import json
import math
import os
import signal

import pytest
import torch
from helpers.runs import assert_same_training, records, run, run_words, saved, write_text

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.errors import ExitCode, NumericsError, StoppedError, exit_code_of
from llmtrain.config.errors import OutOfMemoryError as NoMemory
from llmtrain.config.typed import ScheduleKind
from llmtrain.optim.schedule import learning_rate
from llmtrain.plan.plan import SchedulePlan
from llmtrain.train import build, run_start
from llmtrain.train.engine_native import NativeEngine
from llmtrain.train.forward_backward import PlainForwardBackward
from llmtrain.train.signals import STOP_SIGNALS

WORDS = ("train.steps=6", "accumulation.global_batch_size=4", "checkpoint.every=0")


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text")


def status(folder):
    return json.loads((folder / "status.json").read_text())


@pytest.fixture
def spoil(monkeypatch):
    """Make the gradients of some batches (counted from 1) hold an infinite or undefined value."""

    def install(*calls, value=math.inf):
        plain, count = PlainForwardBackward.run, iter(range(1, 10**6))

        def run_and_spoil(self, microbatches, **keys):
            loss = plain(self, microbatches, **keys)
            if next(count) in calls:
                self._model.get_parameter("norm.weight").grad[0] = value
            return loss

        monkeypatch.setattr(PlainForwardBackward, "run", run_and_spoil)

    return install


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_b10_a_non_finite_batch_is_consumed_but_is_no_step(text, tmp_path, spoil, value):
    run(*run_words(text, tmp_path, "calm", *WORDS, "train.stop_after=2"))
    spoil(3, value=value)
    code, printed = run(*run_words(text, tmp_path, "skips", *WORDS, "checkpoint.every=2"))
    assert code == ExitCode.DONE and "skipped a batch before step 3" in printed
    calm, two = saved(tmp_path / "calm"), saved(tmp_path / "skips")
    assert two.step == 6 and two.state["train"]["skipped"] == 1
    assert two.state["train"]["consumed_samples"] == 7 * 4
    trace = records(tmp_path / "skips")
    assert [record["step"] for record in trace] == [1, 2, 3, 4, 5, 6]
    assert [record["skipped"] for record in trace] == [0, 0, 1, 0, 0, 0]
    schedule = SchedulePlan(ScheduleKind.COSINE, 1e-3, 1e-4, 6, 0, 0)
    assert [record["lr"] for record in trace] == [learning_rate(schedule, k) for k in range(1, 7)]
    assert all(tensor == 6 for name, tensor in two.tensors.items() if name.startswith("optimizer/step/"))
    assert calm.step == 2 and records(tmp_path / "calm") == trace[:2]


def test_b10_weights_and_moments_are_untouched_by_a_skipped_batch(text, tmp_path, spoil):
    run(*run_words(text, tmp_path, "calm", *WORDS, "train.stop_after=2"))
    spoil(*range(3, 100))
    with pytest.raises(NumericsError, match="3 updates in a row were not finite") as caught:
        run(*run_words(text, tmp_path, "bad", *WORDS, "train.max_consecutive_skips=2", "checkpoint.every=1"))
    assert caught.value.exit_code == ExitCode.NUMERICS == status(tmp_path / "bad")["code"]
    assert "max_consecutive_skips=2" in str(caught.value)
    calm, bad = saved(tmp_path / "calm"), saved(tmp_path / "bad")
    assert bad.step == 2 and status(tmp_path / "bad")["step"] == 2
    for name, tensor in bad.tensors.items():
        assert torch.equal(tensor, calm.tensors[name]), name


def test_as_many_skips_as_allowed_do_not_end_the_run(text, tmp_path, spoil):
    spoil(2, 3, 5, 6)
    code, _ = run(*run_words(text, tmp_path, "a", *WORDS, "train.max_consecutive_skips=2"))
    assert code == ExitCode.DONE
    assert [record["skipped"] for record in records(tmp_path / "a")] == [0, 2, 2, 0, 0, 0]


def test_b58_a_skip_before_a_stop_is_counted_after_the_resume(text, tmp_path, spoil, monkeypatch):
    plain = PlainForwardBackward.run
    with monkeypatch.context() as patch:
        spoil(3)
        spoilt, count = PlainForwardBackward.run, iter(range(1, 100))

        def stopped(self, microbatches, **keys):
            if next(count) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return spoilt(self, microbatches, **keys)

        patch.setattr(PlainForwardBackward, "run", stopped)
        code, _ = run(*run_words(text, tmp_path, "a", *WORDS))
    assert code == ExitCode.REQUEUE and saved(tmp_path / "a").state["train"]["skipped_since_step"] == 1
    monkeypatch.setattr(PlainForwardBackward, "run", plain)
    run(*run_words(text, tmp_path, "a", *WORDS))
    assert [record["skipped"] for record in records(tmp_path / "a")] == [0, 0, 1, 0, 0, 0]


START_UP = {
    "start": (build, "RunStart"),
    "model": (run_start, "build_engine"),
    "checkpoint": (CheckpointStore, "load"),
    "machine": (run_start, "peak_flops"),
    "records": (run_start, "open_sink"),
}
"""What a start comes through before its first update."""
BEFORE = [(place, resumed) for place in START_UP for resumed in (False, True) if resumed or place != "checkpoint"]


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("place, resumed", BEFORE)
def test_b55_a_signal_before_the_training_ends_the_start_at_once(text, tmp_path, monkeypatch, place, resumed, number):
    words = run_words(text, tmp_path, "a", *WORDS)
    if resumed:
        run(*words, "train.stop_after=3")
    before = sorted((tmp_path / "a" / "checkpoints").glob("*"))
    traced = records(tmp_path / "a") if resumed else []
    owner, name = START_UP[place]
    plain = getattr(owner, name)

    def signalled(*arguments, **keys):
        os.kill(os.getpid(), number)
        return plain(*arguments, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled)
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else StoppedError) as caught:
            run(*words)
    code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.REQUEUE
    assert exit_code_of(caught.value) == code == status(tmp_path / "a")["code"]
    assert status(tmp_path / "a")["step"] == (3 if resumed else 0)
    assert sorted((tmp_path / "a" / "checkpoints").iterdir()) == before, "there is nothing to save"
    assert (records(tmp_path / "a") if resumed else []) == traced
    assert run(*words)[0] == ExitCode.DONE
    run(*run_words(text, tmp_path, "calm", *WORDS))
    assert_same_training(tmp_path / "a", tmp_path / "calm")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_b55_a_signal_while_the_engine_warms_up_stops_before_the_first_update(text, tmp_path, monkeypatch, number):
    words = run_words(text, tmp_path, "a", *WORDS)
    plain = NativeEngine.warm_up

    def signalled(self, microbatch):
        os.kill(os.getpid(), number)
        return plain(self, microbatch)

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "warm_up", signalled)
        code, _ = run(*words)
    assert code == ExitCode.REQUEUE == status(tmp_path / "a")["code"] and status(tmp_path / "a")["step"] == 0
    assert not list((tmp_path / "a" / "checkpoints").iterdir()) and not records(tmp_path / "a")
    assert run(*words)[0] == ExitCode.DONE and len(records(tmp_path / "a")) == 6


def test_b10_n_steps_are_n_updates_whatever_the_micro_batch(text, tmp_path):
    traces = []
    for micro in (1, 2, 4):
        run(*run_words(text, tmp_path, f"m{micro}", *WORDS, f"accumulation.micro_batch_size={micro}"))
        trace = records(tmp_path / f"m{micro}")
        assert [record["step"] for record in trace] == list(range(1, 7))
        assert [record["tokens"] for record in trace] == [k * 4 * 24 for k in range(1, 7)]
        traces.append([(record["lr"], round(record["loss"], 4)) for record in trace])
    assert traces[0] == traces[1] == traces[2]


def test_train_tokens_rounds_up_to_whole_updates(text, tmp_path):
    code, _ = run(*run_words(text, tmp_path, "a", "train.tokens=193", "accumulation.global_batch_size=4"))
    assert code == ExitCode.DONE and saved(tmp_path / "a").step == 3


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_b55_a_signal_saves_at_the_step_border_and_the_restart_goes_on(text, tmp_path, monkeypatch, number):
    run(*run_words(text, tmp_path, "calm", *WORDS))
    plain, count = PlainForwardBackward.run, iter(range(1, 100))

    def signalled(self, microbatches, **keys):
        if next(count) == 3:
            os.kill(os.getpid(), number)
        return plain(self, microbatches, **keys)

    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    with monkeypatch.context() as patch:
        patch.setattr(PlainForwardBackward, "run", signalled)
        code, printed = run(*run_words(text, tmp_path, "a", *WORDS))
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    assert code == ExitCode.REQUEUE == status(tmp_path / "a")["code"]
    assert status(tmp_path / "a") | {"format_version": 0} == {
        "format_version": 0,
        "code": 75,
        "step": 3,
        "reason": f"stopped by {number.name}",
    }
    assert saved(tmp_path / "a").step == 3 and printed.rstrip().endswith("run.name=a")
    code, _ = run(*run_words(text, tmp_path, "a", *WORDS))
    assert code == ExitCode.DONE and records(tmp_path / "a") == records(tmp_path / "calm")


def test_second_interrupt_ends_at_once_and_keeps_the_last_checkpoint(text, tmp_path, monkeypatch):
    plain, count = PlainForwardBackward.run, iter(range(1, 100))

    def interrupted(self, microbatches, **keys):
        if next(count) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, microbatches, **keys)

    monkeypatch.setattr(PlainForwardBackward, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(*run_words(text, tmp_path, "a", *WORDS, "checkpoint.every=2"))
    assert saved(tmp_path / "a").step == 2 and status(tmp_path / "a")["code"] == ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes."),
        MemoryError(),
    ],
)
def test_out_of_memory_is_one_message_with_three_overrides(text, tmp_path, monkeypatch, error):
    def fail(self, microbatches, **keys):
        raise error

    monkeypatch.setattr(PlainForwardBackward, "run", fail)
    with pytest.raises(NoMemory) as caught:
        run(*run_words(text, tmp_path, "a", *WORDS))
    assert caught.value.exit_code == ExitCode.OUT_OF_MEMORY == status(tmp_path / "a")["code"]
    message = str(caught.value)
    assert "4 sequences × 24 tokens" in message
    assert "accumulation.micro_batch_size=2 or recompute=full or loss=chunked" in message


def test_an_error_of_another_kind_keeps_its_traceback(text, tmp_path, monkeypatch):
    def fail(self, microbatches, **keys):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(PlainForwardBackward, "run", fail)
    with pytest.raises(RuntimeError, match="mat1"):
        run(*run_words(text, tmp_path, "a", *WORDS))
    assert status(tmp_path / "a")["code"] == 70


def test_b45_the_last_step_is_saved_once_when_the_interval_does_not_divide(text, tmp_path):
    run(*run_words(text, tmp_path, "a", *WORDS, "checkpoint.every=4", "checkpoint.keep=9"))
    assert sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


def test_b24_learning_rates_of_a_resumed_run_are_those_of_the_whole(text, tmp_path):
    for kind in ("schedule=wsd", "schedule=cosine", "schedule=linear"):
        name = kind[9:]
        words = ("train.steps=10", "accumulation.global_batch_size=2", kind, "schedule.warmup_steps=3")
        run(*run_words(text, tmp_path, name, *words))
        for stop in (2, 5, 9):
            run(*run_words(text, tmp_path, f"{name}{stop}", *words, f"train.stop_after={stop}"))
            run(*run_words(text, tmp_path, f"{name}{stop}", *words))
            assert [r["lr"] for r in records(tmp_path / f"{name}{stop}")] == [r["lr"] for r in records(tmp_path / name)]


def test_memory_is_measured_on_the_first_two_updates_and_named_by_category(text, tmp_path):
    run(*run_words(text, tmp_path, "a", *WORDS))
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [("memory" in line) for line in lines] == [True, True, False, False, False, False]
    weights = sum(t.numel() * 4 for name, t in saved(tmp_path / "a").tensors.items() if name.startswith("model/"))
    assert lines[1]["memory"]["params"] == weights
    assert lines[1]["peak_memory_bytes"] == sum(lines[1]["memory"].values())
