"""How the tensors of a Hugging Face folder are those of a Transformer: names, matrices stored the other way round, fused ones.

Legend: a tensor that is `fused` holds several of ours one after another along their output channels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from llmtrain.checkpoint.hf_families import GPT2, Family
from llmtrain.config.typed import ModelConfig
from llmtrain.plan.shapes import Shape, block_shapes, parameter_shapes

HEAD = "lm_head.weight"
_LLAMA_OUTSIDE = {"embed.weight": "embed_tokens.weight", "norm.weight": "norm.weight"}
_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_GPT2_OUTSIDE = {
    "embed.weight": "wte.weight",
    "position_embed.weight": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
_BUFFERS = re.compile(r"(?:h\.\d+\.attn\.(?:bias|masked_bias)|(?:layers\.\d+\.self_attn\.)?rotary_emb\.(?:original_)?inv_freq)")
"""Tensors that the library once stored and works out itself: the causal mask, and frequencies that follow from config.json."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a folder and the parameters of ours that it holds."""

    name: str
    """Without the prefix of the family."""
    parameters: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Of `parameters`."""
    transposed: bool
    """Stored as [input, output] channels."""

    @property
    def shape(self) -> Shape:
        """Its shape in the file."""
        rows = sum(shape[0] for shape in self.shapes)
        whole = (rows, *self.shapes[0][1:])
        return whole[::-1] if self.transposed else whole

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def unpack(self, tensor: Tensor) -> dict[str, Tensor]:
        """Our parameters, fp32 and each with memory of its own."""
        tensor = tensor.mT if self.transposed else tensor
        parts = tensor.split([shape[0] for shape in self.shapes])
        # Cast into new memory: what is read may be a view of the file or of the other parts.
        return {name: torch.empty(part.shape).copy_(part) for name, part in zip(self.parameters, parts, strict=True)}

    def pack(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The tensor as it is stored, contiguous."""
        parts = [parameters[name].to(dtype) for name in self.parameters]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (tensor.mT if self.transposed else tensor).contiguous()


def stored_tensors(model: ModelConfig, family: Family) -> tuple[Stored, ...]:
    """What a folder of this model holds, in the order of the model; a tied head is not stored."""
    outside, inside = (_GPT2_OUTSIDE, _GPT2_BLOCK) if family is GPT2 else (_LLAMA_OUTSIDE, _LLAMA_BLOCK)
    shapes = parameter_shapes(model)
    names = {"head.weight": HEAD, **outside}
    for layer in range(model.num_layers):
        block = "h" if family is GPT2 else "layers"
        for name in block_shapes(model):
            part, _, kind = name.rpartition(".")
            names[f"blocks.{layer}.{name}"] = f"{block}.{layer}.{inside[part]}.{kind}"
    holders: dict[str, list[str]] = {}
    for ours in shapes:
        holders.setdefault(names[ours], []).append(ours)
    return tuple(
        Stored(name, tuple(ours), tuple(shapes[one] for one in ours), transposed=_is_transposed(name))
        for name, ours in holders.items()
    )


def _is_transposed(name: str) -> bool:
    """GPT-2's four matrices of a block are stored as the convolutions they were written as."""
    return re.fullmatch(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight", name) is not None


def full_name(name: str, family: Family) -> str:
    """A tensor's name in the files that the library writes."""
    return name if name == HEAD else family.prefix + name


def bare_name(name: str, family: Family) -> str:
    """The same tensor without the prefix, which files made of the class without head do not have."""
    return name.removeprefix(family.prefix)


def is_buffer(name: str) -> bool:
    """Whether a bare name is that of a tensor without any information."""
    return _BUFFERS.fullmatch(name) is not None
