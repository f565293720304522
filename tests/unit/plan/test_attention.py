"""What attention can do where: the table, what `auto` takes, and refusals with the nearest that would do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ExitCode, PlanError
from llmtrain.config.rules_model import KERNELS
from llmtrain.config.typed import RecomputeConfig, RecomputeKind
from llmtrain.plan.attention import ATTENTION, AUTO, AUTO_ORDER, Use, availability, packages, refusal, usable_kernels
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.plan import Availability

EVERYTHING = ("flash-attn-4", "flash-attn-3", "flash-attn")
ON_CPU = Use("cpu", "fp32", training=True)
ON_MPS = Use("mps", "fp32", training=True)
HOPPER = Use("cuda", "bf16", training=True, capability=(9, 0), packages=EVERYTHING)
AMPERE = replace(HOPPER, capability=(8, 0))
BLACKWELL = replace(HOPPER, capability=(10, 0))
WORKSTATION = replace(HOPPER, capability=(12, 0))


@pytest.mark.parametrize(
    ("backend", "kernel", "use", "words"),
    [
        ("blocked", AUTO, HOPPER, "runs on cpu, not on cuda"),
        ("flash_attn", AUTO, ON_CPU, "runs on cuda, not on cpu"),
        ("flash_attn", "fa2", ON_CPU, "runs on cuda, not on cpu"),
        ("flash_attn", AUTO, replace(HOPPER, dtype="fp32"), "computes in bf16, not in fp32"),
        ("flash_attn", AUTO, replace(HOPPER, packages=()), "none of flash-attn, flash-attn-3, flash-attn-4 is installed"),
        ("flash_attn", "fa3", replace(HOPPER, packages=("flash-attn",)), "flash-attn-3 is not installed (pip install"),
        ("flash_attn", AUTO, replace(HOPPER, packages=("flash-attn",), capability=(7, 5)), "8.0 or more, this device has 7.5"),
        ("flash_attn", "fa3", AMPERE, "9.0 or more, this device has 8.0"),
        ("flash_attn", "fa3", BLACKWELL, "made for CUDA capability 9.0, this device has 10.0"),
        ("flash_attn", "fa2", replace(HOPPER, head_dim=264), "heads have 256 channels at most, here 264"),
        ("flash_attn", "fa4", replace(HOPPER, head_dim=264), "heads have 256 channels at most, here 264"),
        ("flash_attn", "fa4", replace(BLACKWELL, head_dim=192), "heads have 128 channels at most or 256, here 192"),
        ("flash_attn", "fa4", replace(WORKSTATION, head_dim=256), "heads have 128 channels at most, here 256"),
        ("flash_attn", "fa4", replace(WORKSTATION, deterministic=True), "train.deterministic=true"),
        ("flash_attn", "fa4", AMPERE, "9.0 or more, this device has 8.0"),
        ("flash_attn", "fa4", replace(HOPPER, kept=True), "recompute.keep=[attention]"),
        ("flash_attn", AUTO, replace(BLACKWELL, kept=True, packages=EVERYTHING[:1]), "recompute.keep=[attention]"),
        ("flex", AUTO, replace(HOPPER, kept=True), "recompute.keep=[attention]"),
        ("a_plugin", AUTO, replace(HOPPER, kept=True), "recompute.keep=[attention]"),
        ("flash_attn", "fa3", replace(HOPPER, head_dim=20), "a multiple of 8, here 20"),
        ("flash_attn", AUTO, replace(HOPPER, dropout=True), "cannot drop attention weights"),
        ("sdpa", AUTO, replace(ON_CPU, dropout=True), "cannot drop attention weights"),
        ("sdpa", "cudnn", ON_CPU, "has no kernel cudnn on cpu, only flash, math"),
        ("sdpa", "memory_efficient", ON_CPU, "has no kernel memory_efficient on cpu"),
        ("sdpa", "flash", replace(HOPPER, dtype="fp32"), "computes in bf16, not in fp32"),
        ("sdpa", "flash", replace(HOPPER, documents=True), "takes no mask, so it is not for document packing"),
        ("sdpa", "flash", replace(HOPPER, windows=True), "takes no mask, so it is not for model.attention.window"),
        ("sdpa", "cudnn", replace(HOPPER, deterministic=True), "train.deterministic=true"),
        ("sdpa", "cudnn", replace(HOPPER, head_dim=36), "a multiple of 8, here 36"),
        ("flex", AUTO, ON_CPU, "has no backward on cpu"),
        ("flex", AUTO, replace(HOPPER, head_dim=8), "heads have 16 channels at least, here 8"),
        ("flex", AUTO, ON_MPS, "runs on cpu and cuda, not on mps"),
        ("blocked", AUTO, ON_MPS, "runs on cpu, not on mps"),
        ("flash_attn", AUTO, ON_MPS, "runs on cuda, not on mps"),
        ("sdpa", "flash", ON_MPS, "has no kernel flash on mps, only math"),
        ("sdpa", AUTO, replace(ON_MPS, dropout=True), "cannot drop attention weights"),
    ],
)
def test_refusals_have_their_reason(backend: str, kernel: str, use: Use, words: str) -> None:
    assert words in refusal(backend, kernel, use)


@pytest.mark.parametrize(
    ("backend", "kernel", "use"),
    [
        *(("reference", AUTO, replace(use, dropout=True, windows=True, documents=True)) for use in (ON_CPU, HOPPER)),
        *(("sdpa", AUTO, replace(use, windows=True, documents=True, head_dim=300)) for use in (ON_CPU, HOPPER)),
        *(("sdpa", kernel, replace(ON_CPU, documents=True, windows=True)) for kernel in ("flash", "math")),
        ("sdpa", "flash", HOPPER),
        *(("sdpa", kernel, replace(HOPPER, documents=True)) for kernel in ("memory_efficient", "cudnn", "math")),
        ("sdpa", "cudnn", replace(HOPPER, deterministic=True, training=False)),
        ("blocked", AUTO, replace(ON_CPU, dtype="bf16", documents=True, windows=True)),
        ("flash_attn", AUTO, replace(HOPPER, documents=True, windows=True, deterministic=True)),
        ("flash_attn", "fa2", replace(HOPPER, capability=None)),
        ("flash_attn", AUTO, replace(HOPPER, packages=None)),
        *(("flash_attn", "fa4", replace(use, head_dim=256, deterministic=True)) for use in (HOPPER, BLACKWELL)),
        ("flash_attn", "fa4", replace(BLACKWELL, capability=(11, 0))),
        ("flash_attn", "fa4", replace(HOPPER, capability=None, head_dim=192, deterministic=True)),
        ("flash_attn", AUTO, replace(WORKSTATION, deterministic=True)),
        *(("flash_attn", kernel, replace(HOPPER, kept=True)) for kernel in (AUTO, "fa2", "fa3")),
        *((backend, AUTO, replace(ON_CPU, kept=True)) for backend in ("reference", "sdpa", "blocked")),
        ("flex", AUTO, replace(HOPPER, dtype="fp32", documents=True, windows=True)),
        ("flex", AUTO, replace(ON_CPU, training=False, documents=True, windows=True)),
    ],
)
def test_what_is_no_refusal(backend: str, kernel: str, use: Use) -> None:
    assert refusal(backend, kernel, use) == ""


def test_reasons_of_several_kernels_are_told_apart() -> None:
    reason = refusal("flash_attn", AUTO, replace(BLACKWELL, head_dim=132, packages=EVERYTHING[:2]))
    assert reason.startswith("fa4: heads have 128 channels at most or 256, here 132; fa3: is made for CUDA capability 9.0")


def test_usable_kernels_are_in_the_order_of_the_table() -> None:
    assert usable_kernels("flash_attn", HOPPER) == ("fa4", "fa3", "fa2")
    assert usable_kernels("flash_attn", BLACKWELL) == ("fa4", "fa2")
    assert usable_kernels("flash_attn", AMPERE) == ("fa2",)
    assert usable_kernels("flash_attn", replace(WORKSTATION, deterministic=True)) == ("fa2",)
    assert usable_kernels("flash_attn", replace(HOPPER, capability=None)) == ("fa4", "fa3", "fa2")
    assert usable_kernels("blocked", ON_CPU) == ()


def test_availability_asks_nothing_of_the_model() -> None:
    on_cpu = availability("cpu", None, ())
    assert {name for name, answer in on_cpu.items() if answer.available} == {"reference", "sdpa", "blocked", "flex"}
    assert on_cpu["flash_attn"].reason == "runs on cuda, not on cpu"
    assert {name for name, answer in availability("mps", None, ()).items() if answer.available} == {"reference", "sdpa"}
    on_cuda = availability("cuda", (8, 0), EVERYTHING)
    assert {name for name, answer in on_cuda.items() if not answer.available} == {"blocked"}
    assert packages() == EVERYTHING


def test_everything_auto_may_take_is_in_the_table() -> None:
    for device, order in AUTO_ORDER.items():
        assert all(ATTENTION[name].on(device) for name in order)


def test_the_kernels_a_config_may_name_are_those_of_the_table() -> None:
    """Config knows the names without the plan, which is above it."""
    named = {name: {way.name for way in row.kernels if way.name} for name, row in ATTENTION.items()}
    assert {name: set(kernels) for name, kernels in KERNELS.items()} == {name: own for name, own in named.items() if own}


def cuda_facts(**changes):
    options = {f"attention.backend={name}": Availability(True) for name in ("reference", "sdpa", "flash_attn", "flex")}
    options["attention.backend=blocked"] = Availability(False, "runs on cpu, not on cuda")
    facts = {"device": "cuda", "device_name": "Some GPU", "capability": (9, 0), "packages": EVERYTHING, "options": options}
    return facts | changes


CPU_OPTIONS = {f"attention.backend={name}": Availability(True) for name in ("reference", "sdpa", "blocked", "flex")}
CPU_OPTIONS["attention.backend=flash_attn"] = Availability(False, "runs on cuda, not on cpu")


def chosen(plan) -> dict[str, tuple[str, str]]:
    return {choice.key: (choice.value, choice.reason) for choice in plan.choices if choice.key.startswith("attention")}


def problem_of(call) -> tuple[str, str, str]:
    with pytest.raises(PlanError) as caught:
        call()
    assert caught.value.exit_code == ExitCode.CONFIG
    (problem,) = caught.value.problems
    return problem.what, problem.rule, problem.cure


def test_attention_auto_on_a_cpu(make_config, make_machine) -> None:
    dropout = make_plan(make_config({"model.dropout.attention": 0.1}), make_machine())
    assert chosen(dropout)["attention.backend"] == ("reference", "attention dropout needs the attention weights")

    def auto(**available: bool) -> tuple[str, str]:
        options = {
            f"attention.backend={name}": Availability(there, "" if there else "no kernel") for name, there in available.items()
        }
        return chosen(make_plan(make_config(), make_machine(options=options)))["attention.backend"]

    assert auto(sdpa=True, blocked=True) == ("blocked", "faster than sdpa on a CPU, keeps no T × T matrix either")
    assert auto(sdpa=True, blocked=False)[0] == "sdpa"
    assert auto(sdpa=False, reference=True) == ("reference", "blocked: not known on this machine; sdpa: no kernel")


@pytest.mark.parametrize(
    ("words", "changes", "backend", "kernel", "reason"),
    [
        ({}, {}, "flash_attn", "fa4", "FlashAttention is installed, keeps no T × T matrix and no mask"),
        ({}, {"capability": (8, 6)}, "flash_attn", "fa2", "FlashAttention is installed, keeps no T × T matrix and no mask"),
        ({}, {"packages": ()}, "sdpa", "auto", "keeps no T × T matrix; flash_attn: none of flash-attn, flash-attn-3"),
        ({"precision.kind": "fp32"}, {}, "sdpa", "auto", "flash_attn: computes in bf16, not in fp32"),
        ({"model.dropout.attention": 0.1}, {}, "reference", "auto", "attention dropout needs the attention weights"),
    ],
)
def test_attention_auto_on_cuda(make_config, make_machine, words, changes, backend, kernel, reason) -> None:
    plan = make_plan(make_config(words), make_machine(**cuda_facts(**changes)))
    assert (plan.attention_backend, plan.attention_kernel) == (backend, kernel)
    choices = chosen(plan)
    assert reason in choices["attention.backend"][1]
    if backend == "flash_attn":
        assert choices["attention.kernel"] == (kernel, "the newest FlashAttention that is installed and runs here")
    else:
        assert "attention.kernel" not in choices


def test_attention_on_mps(make_config, make_machine) -> None:
    """torch's own products and softmax, whose matrices of scores are in the forecast; nothing that no test ever ran is said to have."""
    answers = {f"attention.backend={name}": answer for name, answer in availability("mps", None, ()).items()}
    machine = make_machine(device="mps", device_name="Apple M9", bf16_native=False, options=answers)
    plan = make_plan(make_config({"accumulation.micro_batch_size": 4}), machine)
    assert (plan.attention_backend, plan.attention_kernel) == ("sdpa", "math")
    assert chosen(plan)["attention.kernel"][1].startswith("torch has no other that trains on mps")
    named = {"attention.backend": "sdpa", "attention.kernel": "math", "accumulation.micro_batch_size": 4}
    same = make_plan(make_config(named), machine)
    assert chosen(same) == {} and same.forecast == plan.forecast
    on_cpu = make_plan(make_config(named | {"precision.kind": "fp32"}), make_machine(options=CPU_OPTIONS))
    assert on_cpu.forecast.activations == plan.forecast.activations
    assert problem_of(lambda: make_plan(make_config({"attention.backend": "blocked"}), machine)) == (
        "attention.backend=blocked",
        "not available on Apple M9: runs on cpu, not on mps",
        "sdpa or reference",
    )
    assert make_plan(make_config({"model.dropout.attention": 0.1}), machine).attention_backend == "reference"
    ran = {way.device for row in ATTENTION.values() for way in row.kernels if way.ran}
    assert ran == {"cpu"}


def test_a_named_backend_that_is_absent_is_an_error(make_config, make_machine) -> None:
    options = {
        "attention.backend=reference": Availability(True),
        "attention.backend=sdpa": Availability(False, "torch was built without it"),
    }
    config = make_config({"attention.backend": "sdpa"})
    assert problem_of(lambda: make_plan(config, make_machine(options=options))) == (
        "attention.backend=sdpa",
        "not available on Some CPU: torch was built without it",
        "reference",
    )


@pytest.mark.parametrize(
    ("words", "rule", "cure"),
    [
        ({"attention.backend": "flash_attn"}, "runs on cuda, not on cpu", "blocked or sdpa or reference"),
        ({"attention.backend": "flex"}, "has no backward on cpu", "blocked or sdpa or reference"),
        (
            {"attention.backend": "sdpa", "attention.kernel": "cudnn"},
            "has no kernel cudnn on cpu, only flash, math",
            "attention.kernel=flash or attention.kernel=math or attention.kernel=auto",
        ),
    ],
)
def test_what_a_cpu_cannot_do_is_refused(make_config, make_machine, words, rule, cure) -> None:
    found = problem_of(lambda: make_plan(make_config(words), make_machine(options=CPU_OPTIONS)))
    what = " ".join(f"{key}={value}" for key, value in words.items())
    assert found[0] == what and found[1].startswith("not available on Some CPU: ") and rule in found[1] and found[2] == cure


@pytest.mark.parametrize(
    ("words", "changes", "rule", "cure"),
    [
        ({"attention.backend": "flash_attn", "precision.kind": "fp32"}, {}, "not in fp32", "sdpa or reference or flex"),
        ({"attention.backend": "flash_attn"}, {"packages": ()}, "pip install flash-attn", "sdpa or reference or flex"),
        (
            {"attention.backend": "flash_attn", "attention.kernel": "fa3"},
            {"capability": (8, 0)},
            "9.0 or more, this device has 8.0",
            "attention.kernel=fa2 or attention.kernel=auto",
        ),
        (
            {"attention.backend": "sdpa", "attention.kernel": "flash", "data.packing": "document"},
            {},
            "takes no mask, so it is not for document packing",
            "attention.kernel=memory_efficient or attention.kernel=cudnn or attention.kernel=math or attention.kernel=auto",
        ),
        (
            {"attention.backend": "sdpa", "attention.kernel": "flash", "model.attention.window": 32},
            {"packages": ()},
            "takes no mask, so it is not for model.attention.window",
            "attention.kernel=memory_efficient or attention.kernel=cudnn or attention.kernel=math or attention.kernel=auto",
        ),
    ],
)
def test_what_cuda_cannot_do_is_refused(make_config, make_machine, words, changes, rule, cure) -> None:
    found = problem_of(lambda: make_plan(make_config(words), make_machine(**cuda_facts(**changes))))
    assert rule in found[1] and found[2] == cure


def test_named_kernels_are_kept(make_config, make_machine) -> None:
    for kernel in ("flash", "math"):
        words = {"attention.backend": "sdpa", "attention.kernel": kernel}
        plan = make_plan(make_config(words), make_machine(options=CPU_OPTIONS))
        assert (plan.attention_backend, plan.attention_kernel, chosen(plan)) == ("sdpa", kernel, {})


SELECTIVE = {"recompute.kind": "selective"}
KEEPS_ATTENTION = SELECTIVE | {"recompute.keep": ["attention", "norm"]}


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ({"attention.backend": "flex"}, "flash_attn or sdpa or reference or recompute.keep=[matmul]"),
        (
            {"attention.backend": "flash_attn", "attention.kernel": "fa4"},
            "attention.kernel=fa3 or attention.kernel=fa2 or attention.kernel=auto or recompute.keep=[matmul]",
        ),
    ],
)
def test_results_that_cannot_be_kept_are_not_asked_for_in_vain(make_config, make_machine, words, cure) -> None:
    """Asked for by name: refused. By default: left out, said so, and the forecast follows."""
    machine = make_machine(**cuda_facts())
    found = problem_of(lambda: make_plan(make_config(words | KEEPS_ATTENTION), machine))
    assert "selective recompute cannot keep its results" in found[1] and found[2] == cure
    default = make_plan(make_config(words | SELECTIVE), machine)
    assert default.recompute == RecomputeConfig(RecomputeKind.SELECTIVE, ("matmul",))
    (said,) = (choice for choice in default.choices if choice.key == "recompute.keep")
    assert said.value == "matmul" and said.reason.startswith("without attention: ")
    without = make_plan(make_config(words | SELECTIVE | {"recompute.keep": ["matmul"]}), machine)
    assert without.recompute == default.recompute and without.forecast == default.forecast
    assert not [choice for choice in without.choices if choice.key == "recompute.keep"]
    scored = make_plan(make_config(words | KEEPS_ATTENTION), machine, training=False)
    assert scored.recompute.keep == ("norm",)


def test_the_option_selective_asks_for_nothing_by_name() -> None:
    chosen = compose_config(["recompute=selective"]).config.recompute
    assert chosen == RecomputeConfig(RecomputeKind.SELECTIVE, ("attention", "matmul"), keep_is_default=True)
    named = compose_config(["recompute=selective", "recompute.keep=[attention,matmul]"]).config.recompute
    assert named == RecomputeConfig(RecomputeKind.SELECTIVE, ("attention", "matmul"))


def test_auto_takes_what_can_be_kept(make_config, make_machine) -> None:
    default = make_plan(make_config(SELECTIVE), make_machine(**cuda_facts()))
    assert (default.attention_kernel, default.recompute.keep) == ("fa4", ("matmul",))
    kept = make_plan(make_config(KEEPS_ATTENTION), make_machine(**cuda_facts()))
    assert (kept.attention_kernel, kept.recompute.keep) == ("fa3", ("attention", "norm"))
    only_fa4 = make_plan(make_config(KEEPS_ATTENTION), make_machine(**cuda_facts(packages=EVERYTHING[:1])))
    assert (only_fa4.attention_backend, only_fa4.recompute.keep) == ("sdpa", ("attention", "norm"))
    on_cpu = make_plan(make_config(SELECTIVE), make_machine(options=CPU_OPTIONS))
    assert on_cpu.recompute == RecomputeConfig(RecomputeKind.SELECTIVE, ("attention", "matmul"))


def test_the_plan_knows_where_heads_are_repeated(make_config, make_machine) -> None:
    words = {"attention.backend": "sdpa", "precision.kind": "bf16", "accumulation.micro_batch_size": 4}
    words |= {"model.attention.num_kv_heads": 1, "model.attention.window": 32, "model.vocab_size": 258}
    on_cuda, on_cpu = make_machine(**cuda_facts()), make_machine(options=CPU_OPTIONS)
    plans = [make_plan(make_config(words), machine).forecast.activations for machine in (on_cuda, on_cpu)]
    assert plans[0] > plans[1]


def test_a_trained_model_is_used_with_what_is_here(make_config, make_machine) -> None:
    """Trained elsewhere by FlashAttention: scored on this CPU by `auto`, and said so. What is here is taken as named."""
    words = {"attention.backend": "flash_attn", "attention.kernel": "fa3"}
    machine = make_machine(options=CPU_OPTIONS)
    plan = make_plan(make_config(words), machine, training=False)
    assert (plan.attention_backend, plan.attention_kernel) == ("blocked", "auto")
    assert chosen(plan)["attention.backend"][1].endswith("; flash_attn: runs on cuda, not on cpu")
    flex = make_plan(make_config({"attention.backend": "flex"}), machine, training=False)
    assert (flex.attention_backend, chosen(flex)) == ("flex", {})


def test_the_math_kernel_is_forecast_with_its_scores(make_config, make_machine) -> None:
    def activations(kernel: str) -> int:
        words = {"attention.backend": "sdpa", "attention.kernel": kernel, "accumulation.micro_batch_size": 4}
        return make_plan(make_config(words), make_machine(options=CPU_OPTIONS)).forecast.activations

    assert activations("math") > 1.5 * activations("flash")
