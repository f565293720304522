"""Settles which attention backend and kernel a run uses: what is named is taken or refused, `auto` takes the best that will do."""

from __future__ import annotations

from dataclasses import replace

from llmtrain.config.errors import PlanError, Problem
from llmtrain.config.typed import Config, RecomputeConfig
from llmtrain.config.typed_data import Packing
from llmtrain.plan.attention import ATTENTION, AUTO, AUTO_ORDER, MPS, Use, keeps_results, refusal, usable_kernels
from llmtrain.plan.plan import Choice, Machine
from llmtrain.plan.precision import PRECISION_TABLES

BACKEND, KERNEL, KEEP = "attention.backend", "attention.kernel", "recompute.keep"


def settle_attention(config: Config, precision_name: str, machine: Machine, *, training: bool) -> tuple[str, str, list[Choice]]:
    """Backend, kernel and what `auto` became.

    Args:
        config: `attention`, and what the model and the data ask of it.
        precision_name: a settled row of the precision tables.
        machine: the device, and what is installed.
        training: whether there will be a backward. Without one a named backend is how some other machine trained, so what cannot run
            here makes room for `auto`, which gives the same results but for rounding; only a plugin's may differ and is refused.

    Raises:
        PlanError: a named backend or kernel that cannot do this here; says why and which can.
    """
    use = attention_use(config, precision_name, machine, training=training)
    backend, kernel = config.attention_backend, config.attention_kernel
    aside = ""
    if backend != AUTO:
        reason = _unknown(backend, machine) or refusal(backend, kernel, use)
        if not reason:
            return backend, *_settle_kernel(backend, kernel, use)
        if training or backend not in ATTENTION:
            raise PlanError(_refused(backend, kernel, reason, use, machine))
        aside = f"; {backend}: {reason}"
        kernel = AUTO
    chosen = _first_that_will_do(use, machine)
    kernel, choices = _settle_kernel(chosen.value, kernel, use)
    return chosen.value, kernel, [Choice(BACKEND, chosen.value, chosen.reason + aside), *choices]


def settle_keep(recompute: RecomputeConfig, backend: str, kernel: str, device: str) -> tuple[RecomputeConfig, list[Choice]]:
    """What recompute keeps with a settled backend: results of attention only where torch sees them.

    A run that asks for them by name does not come here with a backend that cannot: `settle_attention` has refused it.
    """
    if "attention" not in recompute.keep or keeps_results(backend, kernel, device):
        return replace(recompute, keep_is_default=False), []
    keep = tuple(family for family in recompute.keep if family != "attention")
    name = backend if kernel == AUTO else f"{backend} {kernel}"
    choice = Choice(KEEP, ", ".join(keep), f"without attention: selective recompute cannot keep the results of {name}")
    return RecomputeConfig(recompute.kind, keep), [choice]


def attention_use(config: Config, precision_name: str, machine: Machine, *, training: bool) -> Use:
    """What the run asks of attention."""
    return Use(
        device=machine.device,
        dtype=PRECISION_TABLES[precision_name].matmul,
        head_dim=config.model.attention.head_dim,
        documents=config.data.packing is not Packing.CONCAT,
        windows=any(window is not None for window in config.model.layer_windows),
        dropout=config.model.dropout.attention > 0,
        training=training,
        deterministic=config.train.deterministic,
        kept=training and "attention" in config.recompute.keep and not config.recompute.keep_is_default,
        capability=machine.capability,
        packages=machine.packages,
    )


def _first_that_will_do(use: Use, machine: Machine) -> Choice:
    if use.dropout:
        return Choice(BACKEND, "reference", "attention dropout needs the attention weights")
    refused: list[str] = []
    for name, why in AUTO_ORDER[use.device].items():
        known = f"{BACKEND}={name}" in machine.options
        reason = (_unknown(name, machine) or refusal(name, AUTO, use)) if known else "not known on this machine"
        if not reason:
            return Choice(BACKEND, name, "; ".join([why, *refused]))
        refused.append(f"{name}: {reason}")
    return Choice(BACKEND, "reference", "; ".join(refused))


def _unknown(backend: str, machine: Machine) -> str:
    """Why the machine says that it has no such backend; empty when it says nothing against it."""
    entry = machine.options.get(f"{BACKEND}={backend}")
    return "" if entry is None or entry.available else entry.reason


def _settle_kernel(backend: str, kernel: str, use: Use) -> tuple[str, list[Choice]]:
    """A kernel by name where the backend has no choice of its own: the newest FlashAttention that will do, torch's only one on MPS."""
    if kernel == AUTO and backend == "sdpa" and use.device == MPS:
        (only,) = usable_kernels(backend, use)
        return only, [Choice(KERNEL, only, "torch has no other that trains on mps; it writes whole matrices of scores")]
    if kernel != AUTO or backend != "flash_attn":
        return kernel, []
    newest, *_ = usable_kernels(backend, use)
    return newest, [Choice(KERNEL, newest, "the newest FlashAttention that is installed and runs here")]


def _refused(backend: str, kernel: str, reason: str, use: Use, machine: Machine) -> Problem:
    """Names what was asked and the nearest that can do it: another kernel of the backend, else other backends, best first."""
    named = kernel != AUTO
    what = f"{BACKEND}={backend}" + (f" {KERNEL}={kernel}" if named else "")
    kernels = [] if _unknown(backend, machine) or not named else [f"{KERNEL}={name}" for name in usable_kernels(backend, use)]
    if named and not (_unknown(backend, machine) or refusal(backend, AUTO, use)):
        kernels.append(f"{KERNEL}={AUTO}")
    known = [name for name in (*AUTO_ORDER[use.device], *ATTENTION) if f"{BACKEND}={name}" in machine.options]
    others = [name for name in dict.fromkeys(known) if not (_unknown(name, machine) or refusal(name, AUTO, use))]
    able = use.kept and not refusal(backend, kernel, replace(use, kept=False))
    keep = [f"{KEEP}=[matmul]"] if able else []
    return Problem(what, f"not available on {machine.device_name}: {reason}", " or ".join([*(kernels or others), *keep]))
