"""Activation recompute: which results of a block are kept for backward and which are computed again.

Dropout masks and positions are pure functions of a block's inputs, so a recomputed block is bit-equal to the first run and no
random state is saved. Casts of master weights to the matmul dtype happen inside a block and are in no family, so under `full` and
`selective` no low-precision copy of a weight outlives its use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from llmtrain.config.typed import RecomputeConfig, RecomputeKind
from llmtrain.model.transformer import Transformer, call_block
from llmtrain.ops.attention_flash import registered_operations
from llmtrain.ops.blocked_attention import blocked_attention_forward
from llmtrain.ops.norm import rms_norm_forward

aten = torch.ops.aten

OPERATION_FAMILIES: Mapping[str, frozenset[Any]] = MappingProxyType(
    {
        "attention": frozenset(
            {
                aten._scaled_dot_product_flash_attention_for_cpu.default,
                aten._scaled_dot_product_flash_attention.default,
                aten._scaled_dot_product_efficient_attention.default,
                aten._scaled_dot_product_cudnn_attention.default,
                blocked_attention_forward,
                aten.bmm.default,
            }
        ),
        "matmul": frozenset({aten.mm.default, aten.addmm.default}),
        "norm": frozenset({rms_norm_forward, aten.native_layer_norm.default}),
        "activation": frozenset({aten.silu.default, aten.gelu.default}),
    }
)
"""Families that `recompute.keep` names → operations whose results are kept. The products of the reference attention are `bmm`.

Not here: the kernels that torch does not see as operations (`Kernel.kept` in plan/attention.py)."""


def apply_recompute(model: Transformer, recompute: RecomputeConfig) -> None:
    """Make the model run its blocks as asked; parameter names do not change."""
    if recompute.kind is RecomputeKind.NONE:
        model.run_block = call_block
    elif recompute.kind is RecomputeKind.FULL:
        model.run_block = run_recomputed
    else:
        kept = frozenset[Any]().union(*(OPERATION_FAMILIES[family] for family in recompute.keep))
        if "attention" in recompute.keep:
            kept |= registered_operations()  # of a package that the model has imported by now
        contexts = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
        model.run_block = partial(run_recomputed, context_fn=contexts)


def run_recomputed(block: nn.Module, *args: Any, context_fn: Callable[[], Any] = noop_context_fn) -> Tensor:
    """Run a block keeping only its inputs (Chen et al. 2016), or also what the contexts of `context_fn` keep."""
    x: Tensor = checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn)
    return x


def _policy(kept: Collection[Any], _context: Any, operation: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE
