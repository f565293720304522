"""An evaluation that a signal cuts short is owed: its record says so, and the next start makes up for it, whatever comes between."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.rank_faults import AtPlace, Fault, SignalAt
from helpers.rank_jobs import assert_same_run, train_rank
from helpers.ranks import RankPool, Training
from helpers.runs import records, run_words, saved, write_text
from helpers.tracker_files import tensorboard_values

from llmtrain.config.errors import ExitCode

STEPS, CUT = 6, 4
WORDS = (
    f"train.steps={STEPS}",
    "accumulation.global_batch_size=4",
    "model.dropout.residual=0.1",
    "train.eval_every=2",
    "train.eval_tokens=96",
    "checkpoint.every=3",
    "checkpoint.keep=9",
    "tracker=tensorboard",
)
TERM, INT = signal.SIGTERM, signal.SIGINT


def stop_in(place: str, step: int, number: int = TERM) -> AtPlace:
    return SignalAt(0, place, number, "rank", step=step)


def kill_in(place: str, step: int) -> AtPlace:
    return Fault(0, place, "kill", step=step)


class Runs:
    """Starts of runs, each in a process of its own."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self._ranks = ranks
        self._text = write_text(folder / "text")
        self.folder = folder

    def start(self, name: str, *words: str, plants: tuple[AtPlace, ...] = ()) -> int:
        """A start of the run `name`; its exit code, -9 when it was killed."""
        job = self._ranks.start(train_rank, 1, run_words(self._text, self.folder, name, *WORDS, *words), plants)
        try:
            codes = job.wait().codes
            return Training(job.results()).code if codes == [0] else codes[0]
        finally:
            self._ranks.finish(job)

    def cut(self, name: str, *words: str, step: int = CUT) -> bytes:
        """A start that a signal stops in the evaluation of an update; the records that it leaves."""
        assert self.start(name, *words, plants=(stop_in("evaluate", step),)) == ExitCode.REQUEUE
        assert saved(self.folder / name).step == step
        last = records(self.folder / name)[-1]
        assert (last["step"], last["unscored"], last.get("val_loss")) == (step, True, None)
        assert step not in tensorboard_values(self.folder / name / "tensorboard"), "a tracker takes a step once"
        return self.metrics(name)

    def metrics(self, name: str) -> bytes:
        return (self.folder / name / "metrics.jsonl").read_bytes()

    def scores(self, name: str) -> dict[int, float]:
        """Steps that have been scored."""
        return {record["step"]: record["val_loss"] for record in records(self.folder / name) if "val_loss" in record}

    def assert_equal(self, ours: str, theirs: str = "calm") -> None:
        """Weights, moments and records are those of the other run, and trackers have the same steps and numbers, each once."""
        assert_same_run(self.folder / ours, self.folder / theirs)
        assert self.tracked(ours) == self.tracked(theirs)
        assert b"unscored" not in self.metrics(ours)

    def tracked(self, name: str) -> dict[int, dict[str, float]]:
        values = tensorboard_values(self.folder / name / "tensorboard")
        names = ("loss", "lr", "grad_norm", "val_loss")
        return {step: {key: row[key] for key in names if key in row} for step, row in values.items()}

    def status(self, name: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / name / "status.json").read_text())
        return document


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(ranks, tmp_path_factory.mktemp("runs"))
    assert made.start("calm") == ExitCode.DONE
    assert list(made.scores("calm")) == [2, 4, 6] == [step for step, row in made.tracked("calm").items() if "val_loss" in row]
    assert list(made.tracked("calm")) == [1, 2, 3, 4, 5, 6]
    return made


@pytest.mark.parametrize("step", [2, CUT, STEPS])
def test_the_next_start_makes_up_for_it(runs: Runs, step: int) -> None:
    name = f"cut-{step}"
    owed = json.loads(runs.cut(name, step=step).splitlines()[-1])
    assert runs.status(name)["reason"] == "stopped by SIGTERM" and runs.status(name)["step"] == step
    assert runs.start(name) == ExitCode.DONE
    runs.assert_equal(name)
    completed = json.loads(runs.metrics(name).splitlines()[step - 1])
    assert completed.pop("val_loss") and owed.pop("unscored") and completed == owed, "times and memory stay what they were"
    before = runs.metrics(name)
    assert runs.start(name) == ExitCode.DONE and runs.metrics(name) == before, "it is finished"


@pytest.mark.parametrize("place", ["start-up", "evaluate", "complete"])
def test_a_kill_before_the_record_is_complete_leaves_it_owed(runs: Runs, place: str) -> None:
    before = runs.cut(f"killed-{place}")
    assert runs.start(f"killed-{place}", plants=(kill_in(place, 0),)) == -signal.SIGKILL
    assert runs.metrics(f"killed-{place}") == before
    assert runs.start(f"killed-{place}") == ExitCode.DONE
    runs.assert_equal(f"killed-{place}")


@pytest.mark.parametrize("step", [CUT, STEPS])
def test_a_kill_after_the_record_is_complete_and_before_a_tracker_has_it(runs: Runs, step: int) -> None:
    name = f"untracked-{step}"
    runs.cut(name, step=step)
    assert runs.start(name, plants=(kill_in("track", 0),)) == -signal.SIGKILL
    last = records(runs.folder / name)[-1]
    assert last["step"] == step and "unscored" not in last and last["val_loss"] == runs.scores("calm")[step]
    assert step not in runs.tracked(name)
    assert runs.start(name) == ExitCode.DONE
    runs.assert_equal(name)


def test_a_kill_in_the_save_that_follows_makes_the_update_again(runs: Runs) -> None:
    """As where a batch system sends SIGTERM and, a little later, SIGKILL: the newest checkpoint is older than the record."""
    plants = (stop_in("evaluate", CUT), kill_in("save", CUT))
    assert runs.start("unsaved", plants=plants) == -signal.SIGKILL
    assert records(runs.folder / "unsaved")[-1]["unscored"] and saved(runs.folder / "unsaved").step == 3
    assert runs.start("unsaved") == ExitCode.DONE
    runs.assert_equal("unsaved")


@pytest.mark.parametrize("number", [TERM, INT])
@pytest.mark.parametrize("step", [CUT, STEPS])
def test_a_second_cut_leaves_it_owed(runs: Runs, step: int, number: int) -> None:
    name = f"twice-{step}-{number}"
    before = runs.cut(name, step=step)
    for _ in range(2):
        assert runs.start(name, plants=(stop_in("evaluate", 0, number),)) == ExitCode.REQUEUE
        assert runs.metrics(name) == before and runs.status(name)["step"] == step
        assert runs.status(name)["code"] == ExitCode.REQUEUE
    assert runs.start(name) == ExitCode.DONE
    runs.assert_equal(name)


@pytest.mark.parametrize("every", [0, 1, 3, 5])
def test_it_is_made_up_for_whatever_is_asked_for_next(runs: Runs, every: int) -> None:
    name = f"every-{every}"
    runs.cut(name)
    assert runs.start(name, f"train.eval_every={every}") == ExitCode.DONE
    calm = runs.scores("calm")
    scored = {2, CUT} | {step for step in (5, 6) if every and (step % every == 0 or step == STEPS)}
    assert set(runs.scores(name)) == scored
    assert all(runs.scores(name)[step] == calm[step] for step in scored & set(calm))
    assert list(runs.tracked(name)) == [1, 2, 3, 4, 5, 6] and runs.tracked(name)[CUT]["val_loss"] == calm[CUT]
    assert b"unscored" not in runs.metrics(name)


@pytest.mark.parametrize("place, number", [("start-up", TERM), ("start-up", INT), ("batch", TERM)])
@pytest.mark.parametrize("owed", [True, False])
def test_a_start_that_is_stopped_before_its_first_update_changes_no_record(
    runs: Runs, place: str, number: int, owed: bool
) -> None:
    name = f"early-{place}-{number}-{owed}"
    if owed:
        before = runs.cut(name)
    else:
        assert runs.start(name, f"train.stop_after={CUT}") == ExitCode.DONE
        before = runs.metrics(name)
    expected = ExitCode.INTERRUPTED if (place, number) == ("start-up", INT) else ExitCode.REQUEUE
    code = runs.start(name, plants=(stop_in(place, 0, number),))
    # An interrupt is no message and comes out of the training as it is.
    assert code == (1 if expected == ExitCode.INTERRUPTED else expected)
    made_up = owed and place == "batch"
    assert (runs.metrics(name) == before) != made_up, "the evaluation comes before the first batch"
    assert [record["step"] for record in records(runs.folder / name)] == [1, 2, 3, 4]
    assert saved(runs.folder / name).step == CUT
    assert runs.start(name) == ExitCode.DONE
    runs.assert_equal(name)


def test_steps_that_nobody_wanted_scored_are_not_owed(runs: Runs) -> None:
    assert runs.start("later", "train.eval_every=0", f"train.stop_after={CUT}") == ExitCode.DONE
    before = runs.metrics("later")
    assert runs.start("later", "train.eval_every=4") == ExitCode.DONE
    assert runs.metrics("later").startswith(before) and set(runs.scores("later")) == {STEPS}


def test_what_is_cut_where_a_start_was_to_end_is_made_up_for(runs: Runs) -> None:
    runs.cut("stop-after", f"train.stop_after={CUT}")
    assert runs.start("stop-after", f"train.stop_after={CUT}") == ExitCode.DONE
    assert runs.scores("stop-after")[CUT] == runs.scores("calm")[CUT]
    assert runs.start("stop-after") == ExitCode.DONE
    runs.assert_equal("stop-after")
