"""make_plan: horizons, schedules, vocabularies and every `auto` with its reason; what does not fit is refused by numbers."""

from __future__ import annotations

import pytest

from llmtrain.config.errors import ExitCode, PlanError
from llmtrain.config.typed import ScheduleConfig, ScheduleKind
from llmtrain.plan.make_plan import check_memory, make_plan, settle_schedule
from llmtrain.plan.plan import Availability
from llmtrain.plan.precision import PRECISION_TABLES
from llmtrain.plan.report import format_bytes

GIB = 2**30
MIB = 2**20


def problem_of(call):
    with pytest.raises(PlanError) as caught:
        call()
    assert caught.value.exit_code == ExitCode.CONFIG
    (problem,) = caught.value.problems
    return problem.what, problem.rule, problem.cure


def choices_of(plan) -> dict[str, tuple[str, str]]:
    return {choice.key: (choice.value, choice.reason) for choice in plan.choices}


def test_every_auto_of_the_default_config_has_a_reason(make_config, make_machine) -> None:
    plan = make_plan(make_config(), make_machine())
    choices = choices_of(plan)
    forecast = f"forecast {format_bytes(plan.forecast.total)}"
    assert choices == {
        "launch.device": ("cpu", "no CUDA device"),
        "launch.threads": ("4", "4 cores / 1 rank"),
        "precision": ("bf16", "this cpu multiplies bf16 natively"),
        "attention.backend": (
            "sdpa",
            "the device's fused kernel, keeps no T × T matrix; blocked: not known on this machine",
        ),
        "accumulation.micro_batch_size": ("16", forecast),
        "parallelism.dp_replicate": ("1", "what is left of world size 1 (one process)"),
        "model.vocab_size": ("258", "the byte tokenizer's vocabulary"),
        "schedule.warmup_steps": ("100", "min(100, 1000 steps / 10)"),
    }
    assert (plan.device, plan.threads, plan.precision_name) == ("cpu", 4, "bf16")
    assert plan.precision == PRECISION_TABLES["bf16"]
    assert plan.steps == 1000


def test_what_is_named_is_no_choice(make_config, make_machine) -> None:
    named = {
        "launch.device": "cpu",
        "launch.threads": 3,
        "precision.kind": "fp32",
        "attention.backend": "reference",
        "accumulation.micro_batch_size": 4,
        "parallelism.dp_replicate": 1,
        "model.vocab_size": 300,
        "schedule.warmup_steps": 0,
    }
    plan = make_plan(make_config(named), make_machine())
    assert plan.choices == ()
    assert (plan.threads, plan.precision_name, plan.attention_backend) == (3, "fp32", "reference")
    assert plan.attention_kernel == "auto"
    assert (plan.batch.micro_batch_size, plan.batch.num_microbatches) == (4, 4)
    assert (plan.model.vocab_size, plan.schedule.warmup_steps) == (300, 0)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ({"train.steps": 7}, 7),
        ({"train.tokens": 4096}, 1),
        ({"train.tokens": 4097}, 2),
        ({"train.tokens": 1_000_000}, 245),
        ({"train.tokens": 1, "accumulation.global_batch_size": 4}, 1),
    ],
)
def test_horizon(make_config, make_machine, words, steps) -> None:
    assert make_plan(make_config(words), make_machine()).steps == steps


@pytest.mark.parametrize(
    ("kind", "warmup", "decay", "steps", "expected"),
    [
        ("cosine", None, None, 1000, (100, 0)),
        ("cosine", None, None, 5000, (100, 0)),
        ("cosine", None, None, 99, (9, 0)),
        ("linear", None, None, 9, (0, 0)),
        ("constant", 50, None, 50, (50, 0)),
        ("wsd", None, None, 1000, (100, 200)),
        ("wsd", None, None, 1, (0, 0)),
        ("wsd", 10, 90, 100, (10, 90)),
    ],
)
def test_schedule_lengths(kind, warmup, decay, steps, expected) -> None:
    plan, choices = settle_schedule(ScheduleConfig(ScheduleKind(kind), warmup, 0.1, decay), 2e-3, steps)
    assert (plan.warmup_steps, plan.decay_steps) == expected
    assert (plan.kind, plan.steps, plan.peak_lr, plan.min_lr) == (ScheduleKind(kind), steps, 2e-3, 2e-4)
    assert len(choices) == (warmup is None)


@pytest.mark.parametrize(
    ("kind", "warmup", "decay", "expected"),
    [
        (
            "cosine",
            101,
            None,
            ("schedule.warmup_steps=101", "warm-up of 101 updates in a run of 100", "100 or less, or a longer run"),
        ),
        (
            "wsd",
            20,
            90,
            (
                "schedule.warmup_steps=20 schedule.decay_steps=90",
                "warm-up of 20 + decay of 90 = 110 updates in a run of 100",
                "train.steps=110 or schedule.decay_steps=80 or schedule.warmup_steps=10",
            ),
        ),
        (
            "wsd",
            None,
            95,
            (
                "schedule.warmup_steps=auto schedule.decay_steps=95",
                "warm-up of 10 + decay of 95 = 105 updates in a run of 100",
                "schedule.decay_steps=90 or schedule.warmup_steps=5",
            ),
        ),
        (
            "wsd",
            90,
            None,
            (
                "schedule.warmup_steps=90",
                "warm-up of 90 + decay of 20 (steps / 5) = 110 updates in a run of 100",
                "schedule.decay_steps=10 or schedule.warmup_steps=80",
            ),
        ),
        (
            "wsd",
            120,
            0,
            (
                "schedule.warmup_steps=120 schedule.decay_steps=0",
                "warm-up of 120 + decay of 0 = 120 updates in a run of 100",
                "train.steps=120 or schedule.warmup_steps=100",
            ),
        ),
    ],
)
def test_phases_longer_than_the_run(kind, warmup, decay, expected) -> None:
    config = ScheduleConfig(ScheduleKind(kind), warmup, 0.1, decay)
    assert problem_of(lambda: settle_schedule(config, 1e-3, 100)) == expected


@pytest.mark.parametrize(
    ("words", "prepared", "vocab"),
    [
        ({}, None, 258),
        ({}, 258, 258),
        ({"model.vocab_size": 320}, None, 320),
        ({"tokenizer.kind": "bpe"}, None, 4096),
        ({"tokenizer.kind": "bpe"}, 3977, 3977),
        ({"tokenizer.kind": "bpe", "tokenizer.vocab_size": 512}, None, 512),
        ({"tokenizer.kind": "char"}, 97, 97),
        ({"tokenizer.kind": "char", "model.vocab_size": 128}, None, 128),
    ],
)
def test_vocabulary(make_config, make_machine, words, prepared, vocab) -> None:
    plan = make_plan(make_config(words), make_machine(), vocab_size=prepared)
    assert plan.model.vocab_size == vocab
    assert ("model.vocab_size" in choices_of(plan)) == ("model.vocab_size" not in words)


@pytest.mark.parametrize(
    ("words", "prepared", "expected"),
    [
        (
            {"model.vocab_size": 257},
            None,
            ("model.vocab_size=257", "at least the vocabulary of the byte tokenizer, 258", "258 or auto"),
        ),
        (
            {"model.vocab_size": 128, "tokenizer.kind": "char"},
            140,
            ("model.vocab_size=128", "at least the vocabulary of the char tokenizer, 140", "140 or auto"),
        ),
        (
            {"tokenizer.kind": "char"},
            None,
            (
                "model.vocab_size=auto",
                "the size of the char tokenizer's vocabulary is only known after its data is prepared",
                "a number, or prepare the data first",
            ),
        ),
    ],
)
def test_vocabulary_that_does_not_fit(make_config, make_machine, words, prepared, expected) -> None:
    assert problem_of(lambda: make_plan(make_config(words), make_machine(), vocab_size=prepared)) == expected


def test_precision_auto_without_native_bf16(make_config, make_machine) -> None:
    plan = make_plan(make_config(), make_machine(bf16_native=False))
    assert plan.precision == PRECISION_TABLES["fp32"]
    assert choices_of(plan)["precision"] == ("fp32", "this cpu does not multiply bf16 natively")
    named = make_plan(make_config({"precision.kind": "bf16"}), make_machine(bf16_native=False))
    assert named.precision_name == "bf16"


@pytest.mark.parametrize("key", ["tokenizer", "optimizer"])
def test_other_options_that_are_absent(make_config, make_machine, key: str) -> None:
    config = make_config({"tokenizer.kind": "bpe"})
    name = {"tokenizer": "bpe", "optimizer": "adamw"}[key]
    options = {f"{key}={name}": Availability(False, "package x is not installed"), f"{key}=other": Availability(True)}
    expected = (f"{key}={name}", "not available on Some CPU: package x is not installed", "other")
    assert problem_of(lambda: make_plan(config, make_machine(options=options))) == expected


def several(ranks: int, nodes: int = 1, source: str = "launch.nproc") -> dict[str, object]:
    """Facts of a machine with `ranks` on each of some hosts, whose cores they share."""
    return {
        "world_size": ranks * nodes,
        "local_world_size": ranks,
        "core_ranks": ranks,
        "num_nodes": nodes,
        "world_source": source,
    }


@pytest.mark.parametrize(
    ("cores", "ranks", "nodes", "threads", "reason"),
    [
        (4, 1, 1, 4, "4 cores / 1 rank"),
        (8, 3, 1, 2, "8 cores / 3 ranks"),
        (2, 4, 1, 1, "2 cores / 4 ranks"),
        (8, 2, 3, 4, "8 cores / 2 ranks on this host"),
        (8, 1, 2, 8, "8 cores / 1 rank on this host"),
    ],
)
def test_threads(make_config, make_machine, cores, ranks, nodes, threads, reason) -> None:
    """The ranks of a host share its cores, and the ranks of all hosts the batch."""
    config = make_config({"accumulation.global_batch_size": 12})
    plan = make_plan(config, make_machine(cores=cores, **several(ranks, nodes)))
    assert plan.threads == threads and choices_of(plan)["launch.threads"] == (str(threads), reason)
    assert plan.degrees.dp_replicate == ranks * nodes == plan.world_size
    assert plan.num_nodes == nodes
    assert plan.batch.micro_batch_size * plan.batch.num_microbatches * ranks * nodes == 12


def test_more_threads_than_cores_are_refused(make_config, make_machine) -> None:
    config = make_config({"launch.threads": 10000})
    what, rule, cure = problem_of(lambda: make_plan(config, make_machine(cores=2)))
    assert (what, cure) == ("launch.threads=10000", "launch.threads=2 or auto") and "at most the 2 cores" in rule


def test_more_threads_than_cores_over_all_ranks_of_a_host_are_refused(make_config, make_machine) -> None:
    def plan(threads: int, **facts):
        words = {"launch.threads": threads, "accumulation.global_batch_size": 12}
        return make_plan(make_config(words), make_machine(cores=8, **facts))

    assert problem_of(lambda: plan(3, **several(3))) == (
        "launch.threads=3",
        "at most the 8 cores of this host for 3 ranks of 3 threads = 9: more threads than cores wait for each other",
        "launch.threads=2 or auto",
    )
    assert plan(2, **several(3)).threads == 2
    assert plan(8, **several(1, 2)).threads == 8, "hosts do not share cores"
    assert plan(1, **several(12)).threads == 1, "each rank needs one"


@pytest.mark.parametrize(
    ("core_ranks", "jobs", "threads", "reason", "rule"),
    [
        (1, 1, 8, "8 cores / 1 rank that may use them", "8 cores that this rank may use"),
        (2, 1, 4, "8 cores / 2 ranks that may use them", "8 cores that this rank may use for 2 ranks of 9 threads = 18"),
        (4, 2, 1, "8 cores / 4 ranks / 2 jobs", "8 cores of this host for 2 jobs of 4 ranks of 9 threads = 72"),
        (1, 4, 2, "8 cores / 1 rank that may use them / 4 jobs", "8 cores that this rank may use for 4 jobs of 1 rank of 9"),
    ],
)
def test_only_those_who_share_cores_divide_them(make_config, make_machine, core_ranks, jobs, threads, reason, rule) -> None:
    """Four ranks of a host, which the batch system has bound to cores, or which are one of some jobs of a sweep."""
    machine = make_machine(**several(4) | {"cores": 8, "core_ranks": core_ranks, "host_jobs": jobs})
    plan = make_plan(make_config(), machine)
    assert plan.threads == threads and choices_of(plan)["launch.threads"] == (str(threads), reason)
    assert make_plan(make_config({"launch.threads": threads}), machine).threads == threads
    what, told, cure = problem_of(lambda: make_plan(make_config({"launch.threads": 9}), machine))
    assert (what, cure) == ("launch.threads=9", f"launch.threads={threads} or auto") and told.startswith(f"at most the {rule}")


@pytest.mark.parametrize("source", ["launch.nproc", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_degrees_that_are_not_the_number_of_ranks_say_who_counted(make_config, make_machine, source) -> None:
    config = make_config({"parallelism.dp_replicate": 3})
    what, rule, cure = problem_of(lambda: make_plan(config, make_machine(**several(2, source=source))))
    assert what == "parallelism.dp_replicate=3" and rule.endswith(f"= 3 must equal the world size 2 ({source})")
    assert cure.startswith("parallelism.dp_replicate=2, ")


def test_a_batch_that_ranks_cannot_share_is_refused(make_config, make_machine) -> None:
    words = {"accumulation.global_batch_size": 8}
    what, rule, _ = problem_of(lambda: make_plan(make_config(words), make_machine(**several(3))))
    assert what == "accumulation.global_batch_size=8" and "3" in rule


def apple(**changes):
    options = {f"attention.backend={name}": Availability(True) for name in ("reference", "sdpa")}
    return {"device": "mps", "device_name": "Apple M9", "bf16_native": False, "options": options} | changes


def test_what_mps_cannot_do_is_refused(make_config, make_machine) -> None:
    words = {"launch.device": "mps", "train.deterministic": True}
    what, rule, cure = problem_of(lambda: make_plan(make_config(words), make_machine(**apple())))
    assert what == "train.deterministic=true launch.device=mps" and "same bits" in rule and "launch.device=cpu" in cure
    assert make_plan(make_config(words), make_machine(**apple()), training=False).device == "mps"
    old = apple(bf16=False)
    words = {"launch.device": "mps", "precision.kind": "bf16"}
    what, rule, cure = problem_of(lambda: make_plan(make_config(words), make_machine(**old)))
    assert (what, cure) == ("precision=bf16", "precision=fp32 or auto") and "macOS 14" in rule
    assert make_plan(make_config(words), make_machine(**apple())).precision_name == "bf16"
    plan = make_plan(make_config({"launch.device": "mps"}), make_machine(**old))
    assert (plan.precision_name, choices_of(plan)["precision"][1]) == ("fp32", "this mps does not multiply bf16 natively")
    assert "launch.device" not in choices_of(plan)


def test_a_named_micro_batch_beyond_the_memory_is_refused(make_config, make_machine) -> None:
    plan = make_plan(make_config({"accumulation.micro_batch_size": 16}), make_machine())
    check_memory(plan, make_machine(memory_bytes=plan.forecast.total))
    what, rule, cure = problem_of(lambda: check_memory(plan, make_machine(memory_bytes=plan.forecast.total - 1)))
    assert what == "accumulation.micro_batch_size=16" and format_bytes(plan.forecast.total) in rule and cure.startswith("auto")


def test_micro_batch_shrinks_with_memory(make_config, make_machine) -> None:
    config = make_config({"precision.kind": "fp32"})
    roomy = make_plan(config, make_machine())
    assert roomy.batch.micro_batch_size == 16
    tight = make_plan(config, make_machine(memory_bytes=roomy.forecast.total))
    assert tight.batch.micro_batch_size in (4, 8)
    assert tight.batch.global_batch_size == 16
    assert tight.forecast.total <= 0.8 * roomy.forecast.total
    value, reason = choices_of(tight)["accumulation.micro_batch_size"]
    assert value == str(tight.batch.micro_batch_size)
    assert reason.startswith(f"forecast {format_bytes(tight.forecast.total)}; {2 * tight.batch.micro_batch_size} needs ")


def test_nothing_fits(make_config, make_machine) -> None:
    config = make_config({"precision.kind": "fp32"})
    what, rule, cure = problem_of(lambda: make_plan(config, make_machine(memory_bytes=10 * MIB)))
    assert what == "accumulation.micro_batch_size=auto"
    assert rule.startswith("one sequence of 256 tokens needs ")
    assert rule.endswith("limit 8.00 MiB (80% of 10.0 MiB)")
    assert cure == "a smaller model (model.dim, model.num_layers) or a shorter data.sequence_length"


def test_nothing_fits_until_recomputed(make_config, make_machine) -> None:
    words = {
        "precision.kind": "fp32",
        "model.num_layers": 16,
        "data.sequence_length": 1024,
        "accumulation.global_batch_size": 2,
    }
    fits = make_plan(make_config(words | {"recompute.kind": "full", "accumulation.micro_batch_size": 1}), make_machine())
    machine = make_machine(memory_bytes=int(fits.forecast.total / 0.8) + 1)
    _, _, cure = problem_of(lambda: make_plan(make_config(words), machine))
    assert cure.startswith("recompute=full (needs ")
    assert make_plan(make_config(words | {"recompute.kind": "full"}), machine).batch.micro_batch_size == 1


def test_missing_packages_are_told_together_each_with_its_command(make_config, make_machine) -> None:
    reason = "the package {0} is not installed (pip install {0})"
    options = {f"tracker={name}": Availability(False, reason.format(name)) for name in ("wandb", "tensorboard")}
    config = make_config({"tracker.wandb.enabled": True, "tracker.tensorboard.enabled": True})
    with pytest.raises(PlanError) as caught:
        make_plan(config, make_machine(options=options))
    assert [(problem.what, problem.cure) for problem in caught.value.problems] == [
        ("tracker=wandb", "pip install wandb"),
        ("tracker=tensorboard", "pip install tensorboard"),
    ]
    assert all("not available on" not in problem.rule for problem in caught.value.problems)
