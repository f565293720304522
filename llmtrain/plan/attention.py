"""What each attention backend can do: one table, which the planner, the ops, the doctor and docs/attention.md read.

A row is one way to compute on one device. What a row does not allow is refused before a tensor is made, with the reason; no backend
or kernel stands in for another. The limits of the CUDA rows are those of torch's and the packages' own checks (torch 2.13
`sdp_utils.cpp`, flash-attn 2.8, FlashAttention-3 `hopper/`, flash-attn-4 4.0). On MPS torch has a fused kernel for inference only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from llmtrain.plan.plan import Availability

AUTO = "auto"
CPU, CUDA, MPS = "cpu", "cuda", "mps"
Capability = tuple[int, int]
"""CUDA compute capability, major and minor."""


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention on one device."""

    name: str
    """What `attention.kernel` calls it; empty = the backend's only way."""
    device: str
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    """Of queries, keys and values."""
    trains: bool = True
    masks: bool = True
    """Whether it can keep documents apart and end at a window."""
    deterministic: bool = True
    """Whether its gradients can be the same bits every time."""
    kept: bool = True
    """Whether selective recompute can keep its results: torch has to see its forward as an operation."""
    capability: Capability | None = None
    """Lowest CUDA capability."""
    last_capability: Capability | None = None
    smallest_head_dim: int = 1
    largest_head_dim: int | None = None
    other_head_dims: tuple[int, ...] = ()
    """Larger ones that it takes all the same."""
    head_dim_multiple: int = 1
    package: str = ""
    """What has to be installed besides torch."""

    @property
    def ran(self) -> bool:
        """Whether the tests of this version ran it on its device; no CUDA and no MPS device was at hand."""
        return self.device == CPU


@dataclass(frozen=True)
class Backend:
    """One option of `attention`."""

    kernels: tuple[Kernel, ...]
    """Newest first where several are of one package family."""
    documents: str
    """How documents of a row are kept apart."""
    windows: str
    """How a window ends."""
    dropout: bool = False

    def on(self, device: str) -> tuple[Kernel, ...]:
        """Its kernels for a device."""
        return tuple(kernel for kernel in self.kernels if kernel.device == device)


FLASH_4 = Kernel(
    "fa4",
    CUDA,
    ("bf16",),
    kept=False,
    smallest_head_dim=8,
    largest_head_dim=128,
    head_dim_multiple=8,
    package="flash-attn-4",
)
"""What all its rows share; generations of devices differ in the rest."""

ATTENTION: Mapping[str, Backend] = MappingProxyType(
    {
        "reference": Backend((Kernel("", CPU), Kernel("", CUDA), Kernel("", MPS)), "mask", "mask", dropout=True),
        "sdpa": Backend(
            (
                Kernel("flash", CPU),
                Kernel("math", CPU),
                Kernel("flash", CUDA, ("bf16",), masks=False, capability=(8, 0), largest_head_dim=256),
                Kernel("memory_efficient", CUDA, capability=(5, 0), head_dim_multiple=4),
                Kernel(
                    "cudnn",
                    CUDA,
                    ("bf16",),
                    deterministic=False,
                    capability=(8, 0),
                    largest_head_dim=128,
                    head_dim_multiple=8,
                ),
                Kernel("math", CUDA),
                Kernel("math", MPS),
            ),
            "mask",
            "mask",
        ),
        "blocked": Backend((Kernel("", CPU),), "mask, a block at a time", "keys outside are skipped"),
        "flash_attn": Backend(
            (
                replace(FLASH_4, capability=(9, 0), last_capability=(9, 0), largest_head_dim=256),
                replace(FLASH_4, capability=(10, 0), last_capability=(11, 0), other_head_dims=(256,)),
                replace(FLASH_4, capability=(12, 0), deterministic=False),
                Kernel(
                    "fa3",
                    CUDA,
                    ("bf16",),
                    capability=(9, 0),
                    last_capability=(9, 0),
                    largest_head_dim=256,
                    head_dim_multiple=8,
                    package="flash-attn-3",
                ),
                Kernel("fa2", CUDA, ("bf16",), capability=(8, 0), largest_head_dim=256, package="flash-attn"),
            ),
            "lengths of the documents",
            "keys outside are skipped",
        ),
        "flex": Backend(
            (
                Kernel("", CPU, trains=False, kept=False),
                Kernel("", CUDA, kept=False, capability=(7, 0), smallest_head_dim=16, largest_head_dim=256),
            ),
            "block mask",
            "block mask",
        ),
    }
)
"""By value of `attention.backend`."""

AUTO_ORDER: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        CPU: {
            "blocked": "faster than sdpa on a CPU, keeps no T × T matrix either",
            "sdpa": "the device's fused kernel, keeps no T × T matrix",
        },
        CUDA: {
            "flash_attn": "FlashAttention is installed, keeps no T × T matrix and no mask",
            "sdpa": "the device's fused kernel, keeps no T × T matrix",
        },
        MPS: {"sdpa": "torch's own products and softmax, the only ones of torch that train on mps"},
    }
)
"""By device the backends that `auto` tries, best first, each with the reason to take it; after them `reference`."""

NOT_KEPT = "selective recompute cannot keep its results, which recompute.keep=[attention] asks for"


@dataclass(frozen=True)
class Use:
    """What a run asks of attention, and of which device."""

    device: str
    dtype: str = "bf16"
    """Of queries, keys and values."""
    head_dim: int = 64
    documents: bool = False
    """Whether rows hold documents that are kept apart."""
    windows: bool = False
    """Whether any layer has a window."""
    dropout: bool = False
    training: bool = False
    deterministic: bool = False
    kept: bool = False
    """Whether the config says that recompute keeps the results (`recompute.keep`)."""
    capability: Capability | None = None
    """Of the CUDA device; None = not known, nothing is refused for it."""
    packages: Collection[str] | None = None
    """The packages of the table that are installed; None = not known, nothing is refused for it."""

    def lacks(self, package: str) -> bool:
        """Whether a package is known to be missing."""
        return bool(package) and self.packages is not None and package not in self.packages


def refusal(backend: str, kernel: str, use: Use) -> str:
    """Why a backend with a kernel (or `auto`) cannot do what is asked; empty when it can."""
    row = ATTENTION.get(backend)
    if row is None:  # a plugin's: it is given every mask; of its devices the machine knows
        return "cannot drop attention weights" if use.dropout else NOT_KEPT if use.kept else ""
    here = row.on(use.device)
    if not here:
        return f"runs on {' and '.join(dict.fromkeys(way.device for way in row.kernels))}, not on {use.device}"
    if use.dropout and not row.dropout:
        return "cannot drop attention weights"
    if kernel != AUTO:
        here = tuple(way for way in here if way.name == kernel)
        if not here:
            known = list(dict.fromkeys(way.name for way in row.on(use.device) if way.name))
            return f"has no kernel {kernel} on {use.device}" + (f", only {', '.join(known)}" if known else "")
    return _refusal_of_all(here, use)


def usable_kernels(backend: str, use: Use) -> tuple[str, ...]:
    """Kernels of a backend that can do what is asked, in the order of the table."""
    names = (way.name for way in ATTENTION[backend].on(use.device) if way.name and not _kernel_refusal(way, use))
    return tuple(dict.fromkeys(names))


def keeps_results(backend: str, kernel: str, device: str) -> bool:
    """Whether selective recompute can keep what a backend computes; of a plugin's, torch may see any operations or none."""
    if backend not in ATTENTION:
        return False
    return all(way.kept for way in ATTENTION[backend].on(device) if kernel in (AUTO, way.name))


def repeats_groups(*, device: str, masked: bool, dtype: str, kernel: str) -> bool:
    """Whether `sdpa` is given key-value heads that were repeated for the query heads of their group.

    On CUDA flash takes neither a mask nor fp32 and the memory-efficient kernel no grouped heads, so torch would write out all scores.

    Args:
        masked: whether documents or a window hide keys besides those after the query.
    """
    if kernel == AUTO:
        return device == CUDA and (masked or dtype == "fp32")
    return kernel == "memory_efficient"


def availability(device: str, capability: Capability | None, packages: Collection[str] | None) -> dict[str, Availability]:
    """Which backends run on a device at all, whatever the model, and why not where not."""
    use = Use(device, capability=capability, packages=packages)
    reasons = {name: refusal(name, AUTO, use) for name in ATTENTION}
    return {name: Availability(not reason, reason) for name, reason in reasons.items()}


def packages() -> tuple[str, ...]:
    """Every package that a row needs."""
    return tuple(dict.fromkeys(way.package for row in ATTENTION.values() for way in row.kernels if way.package))


def _refusal_of_all(ways: tuple[Kernel, ...], use: Use) -> str:
    """Empty when one of several ways will do, else the reasons, those of installed packages first."""
    installed = tuple(way for way in ways if not use.lacks(way.package))
    if not installed:
        names = [*dict.fromkeys(way.package for way in reversed(ways))]
        missing = names[0] if len(names) == 1 else f"none of {', '.join(names)}"
        return f"{missing} is {'' if len(names) > 1 else 'not '}installed (pip install {names[0]})"
    reasons: dict[str, str] = {}
    for way in sorted(installed, key=lambda way: not _is_for(way, use.capability)):
        reason = _kernel_refusal(way, use)
        if not reason:
            return ""
        reasons.setdefault(way.name, reason)
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _kernel_refusal(way: Kernel, use: Use) -> str:
    asked = (("document packing", use.documents), ("model.attention.window", use.windows))
    needs = " and ".join(words for words, wanted in asked if wanted and not way.masks)
    multiple, largest = way.head_dim_multiple, way.largest_head_dim
    others = "".join(f" or {dim}" for dim in way.other_head_dims)
    checks = {
        f"{way.package} is not installed (pip install {way.package})": use.lacks(way.package),
        f"computes in {' and '.join(way.dtypes)}, not in {use.dtype}": use.dtype not in way.dtypes,
        f"has no backward on {way.device}: it evaluates and generates there, and trains on {CUDA}": use.training
        and not way.trains,
        f"needs a CUDA capability of {_dotted(way.capability)} or more, this device has {_dotted(use.capability)}": _below(
            use.capability, way.capability
        ),
        f"is made for CUDA capability {_dotted(way.last_capability)}, this device has {_dotted(use.capability)}": _below(
            way.last_capability, use.capability
        ),
        f"heads have {largest} channels at most{others}, here {use.head_dim}": largest is not None
        and use.head_dim > largest
        and use.head_dim not in way.other_head_dims,
        f"heads have {way.smallest_head_dim} channels at least, here {use.head_dim}": use.head_dim < way.smallest_head_dim,
        f"channels of a head are a multiple of {multiple}, here {use.head_dim}": use.head_dim % multiple != 0,
        f"takes no mask, so it is not for {needs}": bool(needs),
        "its gradients are not the same bits every time, which train.deterministic=true needs": use.training
        and use.deterministic
        and not way.deterministic,
        NOT_KEPT: use.kept and not way.kept,
    }
    return next((reason for reason, holds in checks.items() if holds), "")


def _is_for(way: Kernel, capability: Capability | None) -> bool:
    return not (_below(capability, way.capability) or _below(way.last_capability, capability))


def _below(first: Capability | None, second: Capability | None) -> bool:
    return first is not None and second is not None and first < second


def _dotted(capability: Capability | None) -> str:
    return "" if capability is None else f"{capability[0]}.{capability[1]}"
