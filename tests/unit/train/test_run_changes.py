"""What a resumed run may have changed."""

import itertools
from dataclasses import replace

import pytest
import yaml
from helpers.faulty_files import UnsyncedFiles
from helpers.run_folders import decide, start, wire
from helpers.tiny import MACHINE

from llmtrain.config.errors import ConfigError
from llmtrain.config.keys import leaves
from llmtrain.config.typed import ScheduleKind
from llmtrain.optim.schedule import learning_rate
from llmtrain.plan.plan import SchedulePlan
from llmtrain.train.run_changes import EFFECTS, Effect, check_horizon, effect_of
from llmtrain.train.run_folder import RunFolder, Start


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "demo", UnsyncedFiles())


def test_every_section_of_the_schema_has_an_effect():
    """A new section must be thought about; a row that leads nowhere is a slip."""
    for key in leaves():
        assert any(key == row or key.startswith(f"{row}.") for row in EFFECTS), key
    for row in EFFECTS:
        assert any(key == row or key.startswith(f"{row}.") for key in leaves()), row
    assert effect_of("something.new") is Effect.TRAINING


PASSING = {
    "train__stop_after": 900,
    "train__log_every": 1,
    "train__eval_every": 7,
    "checkpoint__every": 3,
    "checkpoint__keep": 9,
    "launch__threads": 3,
    "launch__device": "cpu",
    "accumulation__micro_batch_size": 2,
    "recompute__kind": "full",
    "attention__backend": "reference",
    "loss__kind": "chunked",
}
TRAINING = {
    "optimizer__lr": 0.5,
    "optimizer__weight_decay": 0.0,
    "optimizer__clip_norm": None,
    "run__seed": 1,
    "accumulation__global_batch_size": 32,
    "precision__kind": "fp32",
    "schedule__warmup_steps": 3,
    "schedule__kind": "linear",
    "train__deterministic": True,
    "train__max_consecutive_skips": 3,
    "model__dropout": {"embedding": 0.0, "attention": 0.0, "residual": 0.1, "feed_forward": 0.0},
}
SHAPE = {
    "model__dim": 256,
    "model__num_layers": 2,
    "model__tie_embeddings": True,
    "model__norm_eps": 1e-6,
    "data__sequence_length": 128,
    "data__packing": "document",
    "data__kind": "synthetic",
    "tokenizer__kind": "char",
}


@pytest.mark.parametrize("key", PASSING)
def test_what_leaves_the_training_alone_passes_and_is_shown(folder, key):
    start(folder, wire(), saved=[250])
    opening = decide(folder, wire(**{key: PASSING[key]}))
    assert opening.start is Start.RESUME
    assert [change.key for change in opening.changes] == [key.replace("__", ".")]


@pytest.mark.parametrize("key", TRAINING)
def test_what_changes_the_training_needs_a_word(folder, key):
    start(folder, wire(), saved=[250])
    with pytest.raises(ConfigError, match=key.replace("__", ".")) as caught:
        decide(folder, wire(**{key: TRAINING[key]}))
    assert "run.on_change=continue" in str(caught.value) and "->" in str(caught.value)
    opening = decide(folder, wire(run__on_change="continue", **{key: TRAINING[key]}))
    assert opening.start is Start.RESUME and len(opening.changes) == 1


@pytest.mark.parametrize("key", SHAPE)
def test_what_no_longer_fits_never_passes(folder, key):
    start(folder, wire(), saved=[250])
    for on_change in ("refuse", "continue"):
        with pytest.raises(ConfigError, match=key.replace("__", ".")) as caught:
            decide(folder, wire(run__on_change=on_change, **{key: SHAPE[key]}))
        assert "on_change" not in str(caught.value)


def test_all_changes_come_in_one_report_with_their_origin(folder):
    start(folder, wire(), saved=[250])
    with pytest.raises(ConfigError) as caught:
        decide(folder, wire(optimizer__lr=0.5, model__dim=64, train__steps=2000, checkpoint__every=1))
    told = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "optimizer.lr=0.5" in told and "0.001 -> 0.5" in told and "command line, word 3" in told
    assert "model.dim=64" in told and "128 -> 64" in told
    assert "train.steps=2000" in told and "1000 -> 2000" in told
    assert "checkpoint.every" not in told


def test_a_default_written_out_is_no_change(folder):
    start(folder, wire(), saved=[250])
    written = wire(
        train__steps=1000, accumulation__global_batch_size=16, schedule__min_lr_ratio=0.1, model__attention__head_dim=32
    )
    assert decide(folder, written).changes == ()
    start(folder, written)
    assert decide(folder, wire()).changes == ()


def test_keys_that_are_younger_or_older_than_the_run(folder):
    start(folder, wire(), saved=[250])
    path = folder.path / "config.yaml"
    document = yaml.safe_load(path.read_text())
    del document["train"]["max_consecutive_skips"]
    path.write_text(yaml.safe_dump(document))
    assert decide(folder, wire()).changes == ()
    with pytest.raises(ConfigError, match="10 -> 3"):
        decide(folder, wire(train__max_consecutive_skips=3))
    document["optimizer"]["nesterov"] = True
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match="optimizer.nesterov"):
        decide(folder, wire())


# --- another end ---


@pytest.mark.parametrize(
    "kind, reached, steps, passes",
    [
        ("constant", 1000, 2000, True),
        ("constant", 600, 1500, True),
        ("constant", 600, 500, False),
        ("cosine", 10, 2000, False),
        ("linear", 1000, 2000, False),
        ("wsd", 800, 2000, True),
        ("wsd", 801, 2000, False),
        ("wsd", 1000, 2000, False),
        ("wsd", 400, 500, True),
        ("wsd", 401, 500, False),
        ("wsd", 400, 450, False),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_moving_the_end(folder, kind, reached, steps, passes, finished):
    """wsd decays over the last fifth: of 1000 updates after 800, of 500 after 400, of 450 after 360."""
    base = {"schedule__kind": kind, "schedule__warmup_steps": 100}
    start(folder, wire(train__steps=1000, **base), saved=[reached], code=0 if finished else None, step=reached)
    longer = wire(train__steps=steps, **base)
    if passes:
        opening = decide(folder, longer)
        assert opening.start is Start.RESUME and [change.key for change in opening.changes] == ["train.steps"]
    else:
        with pytest.raises(ConfigError, match=f"train.steps={steps}"):
            decide(folder, longer)
    if steps >= reached:
        kept_on = decide(folder, wire(train__steps=steps, run__on_change="continue", **base))
        assert kept_on.start is Start.RESUME


@pytest.mark.parametrize("kind", ["constant", "wsd"])
@pytest.mark.parametrize(
    "old, new, passes",
    [(100, 2000, False), (1000, 500, False), (1000, 2000, True), (100, 109, True), (10, 9, True), (19, 20, False)],
)
def test_moving_the_end_must_not_move_the_warm_up(folder, kind, old, new, passes):
    """`auto` warms up over min(100, steps / 10): of 100 updates 10, of 2000 all of 100. The lengths 0 and 1 are one."""
    start(folder, wire(train__steps=old, schedule__kind=kind), saved=[5])
    longer = wire(train__steps=new, schedule__kind=kind)
    if passes:
        assert decide(folder, longer).start is Start.RESUME
    else:
        with pytest.raises(ConfigError) as caught:
            decide(folder, longer)
        (problem,) = caught.value.problems
        before, after = (0.001 / min(100, steps // 10) for steps in (old, new))
        assert problem.what == f"train.steps={new}" and f"train.steps={old}" in problem.cure
        assert f"learning rate of update 1 was {before:.3g} and would have been {after:.3g}" in problem.rule
    assert decide(folder, wire(train__steps=new, schedule__kind=kind, run__on_change="continue")).start is Start.RESUME


@pytest.mark.parametrize("kind", ["constant", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 7])
def test_moving_the_end_passes_exactly_if_all_learning_rates_so_far_stay(kind, warmup):
    def schedule(steps, warmup, decay):
        return SchedulePlan(ScheduleKind(kind), 1.0, 0.1, steps, warmup, decay if kind == "wsd" else 0)

    old = schedule(20, warmup, 5)
    for steps, other, decay, reached in itertools.product((13, 19, 21, 40), (0, 1, 3, 4), (0, 1, 5, 9), range(1, 21)):
        new = schedule(steps, other, decay)
        same = all(learning_rate(old, k) == learning_rate(new, k) for k in range(1, reached + 1))
        passes = check_horizon(old, new, reached=reached, keep_going=False) is None
        assert passes == (same and steps >= reached), (steps, other, decay, reached)


# --- what auto became ---


def test_auto_precision_that_settles_otherwise_is_a_change(folder):
    start(folder, wire(), saved=[250])
    elsewhere = replace(MACHINE, bf16_native=False)
    with pytest.raises(ConfigError, match="bf16 -> fp32") as caught:
        decide(folder, wire(), elsewhere)
    (problem,) = caught.value.problems
    assert problem.what == "precision.kind=fp32" and problem.cure.startswith("precision.kind=bf16, run.on_change=continue")
    opening = decide(folder, wire(run__on_change="continue"), elsewhere)
    assert opening.start is Start.RESUME and [str(change) for change in opening.changes] == ["precision.kind: bf16 -> fp32"]


def test_the_precision_auto_became_may_be_written_out(folder):
    start(folder, wire(), saved=[250])
    for machine in (MACHINE, replace(MACHINE, bf16_native=False)):
        assert decide(folder, wire(precision__kind="bf16"), machine).changes == ()


def test_the_same_end_in_tokens(folder):
    start(folder, wire(train__steps=1000), saved=[250])
    same = decide(folder, wire(train__tokens=1000 * 16 * 256))
    assert same.start is Start.RESUME and {change.key for change in same.changes} == {"train.steps", "train.tokens"}
    with pytest.raises(ConfigError, match="train.steps=2000"):
        decide(folder, wire(train__tokens=2000 * 16 * 256))
