"""Same weights, same numbers as the transformers library: logits and gradients at all positions, and parameter counts of the presets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models import GPT2_LIKE, LLAMA_LIKE, build, gradients, random_tokens, relative_error
from torch import Tensor

from llmtrain.config.compose import compose_config
from llmtrain.config.typed import FeedForwardConfig, FeedForwardKind, ModelConfig, NormKind, ReferenceLoss
from llmtrain.model.transformer import Transformer
from llmtrain.ops.cross_entropy import build_loss
from llmtrain.plan.precision import PRECISION_TABLES

transformers = pytest.importorskip("transformers")

VOCAB_SIZE, LENGTH = 211, 96

LLAMA = replace(
    LLAMA_LIKE,
    dim=48,
    vocab_size=VOCAB_SIZE,
    max_positions=LENGTH,
    norm_eps=1e-6,
    rope_theta=500000.0,
    attention=replace(LLAMA_LIKE.attention, num_heads=6, num_kv_heads=2, head_dim=16),
    feed_forward=FeedForwardConfig(FeedForwardKind.SWIGLU, 80, bias=False),
)
GPT2 = replace(GPT2_LIKE, vocab_size=VOCAB_SIZE, max_positions=LENGTH)
QWEN3 = replace(LLAMA, attention=replace(LLAMA.attention, qk_norm=True), tie_embeddings=True)


def llama_config(model: ModelConfig, **changes: Any) -> dict[str, Any]:
    """Our shape in the words of Llama-like configs."""
    return {
        "hidden_size": model.dim,
        "num_hidden_layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "num_attention_heads": model.attention.num_heads,
        "num_key_value_heads": model.attention.num_kv_heads,
        "head_dim": model.attention.head_dim,
        "attention_bias": model.attention.bias,
        "intermediate_size": model.feed_forward.hidden_dim,
        "tie_word_embeddings": model.tie_embeddings,
        "attn_implementation": "eager",
    } | changes


def llama_twin(model: ModelConfig) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_config(model)))


def qwen3_twin(model: ModelConfig) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**llama_config(model)))


def gpt2_twin(model: ModelConfig) -> Any:
    config = transformers.GPT2Config(
        n_embd=model.dim,
        n_layer=model.num_layers,
        n_head=model.attention.num_heads,
        n_inner=model.feed_forward.hidden_dim,
        vocab_size=model.vocab_size,
        n_positions=model.max_positions,
        layer_norm_epsilon=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)


def llama_names(model: ModelConfig) -> dict[str, str]:
    """Our parameter names → theirs."""
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not model.tie_embeddings:
        names["head.weight"] = "lm_head.weight"
    parts = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    parts |= {f"attention.{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attention.out": "self_attn.o_proj"}
    parts |= {f"feed_forward.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    if model.attention.qk_norm:
        parts |= {f"attention.{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
    for layer in range(model.num_layers):
        names |= {f"blocks.{layer}.{ours}.weight": f"model.layers.{layer}.{theirs}.weight" for ours, theirs in parts.items()}
    return names


GPT2_PARTS = {
    "attention_norm": "ln_1",
    "attention.out": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}


def _transposed(x: Tensor) -> Tensor:
    return x if x.ndim == 1 else x.mT


def gpt2_tensors(theirs: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """GPT-2 stores matrices transposed, and query, key and value as one."""
    ours = {"embed.weight": theirs["transformer.wte.weight"], "position_embed.weight": theirs["transformer.wpe.weight"]}
    for kind in ("weight", "bias"):
        ours[f"norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for layer in range(model.num_layers):
            block, twin = f"blocks.{layer}", f"transformer.h.{layer}"
            for part, name in GPT2_PARTS.items():
                ours[f"{block}.{part}.{kind}"] = _transposed(theirs[f"{twin}.{name}.{kind}"])
            joined = _transposed(theirs[f"{twin}.attn.c_attn.{kind}"])
            for part, tensor in zip("qkv", joined.chunk(3), strict=True):
                ours[f"{block}.attention.{part}.{kind}"] = tensor
    return ours


def llama_tensors(theirs: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    return {ours: theirs[name] for ours, name in llama_names(model).items()}


Twin = tuple[ModelConfig, Callable[[ModelConfig], Any], Callable[[dict[str, Tensor], ModelConfig], dict[str, Tensor]]]
TWINS: dict[str, Twin] = {
    "llama": (LLAMA, llama_twin, llama_tensors),
    "gpt2": (GPT2, gpt2_twin, gpt2_tensors),
    "qwen3": (QWEN3, qwen3_twin, llama_tensors),
}


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked"])
@pytest.mark.parametrize("name", TWINS)
def test_logits_and_gradients(name: str, backend: str) -> None:
    config, make_twin, tensors = TWINS[name]
    twin = make_twin(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():  # biases and norms too, so that none can be mixed up unseen
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    ours = build(config, backend=backend)
    theirs = tensors(dict(twin.named_parameters()), config)
    assert theirs.keys() == dict(ours.named_parameters()).keys()
    with torch.no_grad():
        for parameter_name, parameter in ours.named_parameters():
            parameter.copy_(theirs[parameter_name])
    tokens, targets = random_tokens(2, LENGTH, vocab_size=VOCAB_SIZE), random_tokens(2, LENGTH, seed=1, vocab_size=VOCAB_SIZE)

    hidden, expected = ours(tokens), twin(tokens).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(ours.logits(hidden), expected, rtol=0, atol=1e-4)
    build_loss(ReferenceLoss(), ours.precision)(hidden.flatten(0, 1), ours.head_weight, targets.flatten()).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    expected_gradients = tensors({key: parameter.grad for key, parameter in twin.named_parameters()}, config)
    for parameter_name, gradient in gradients(ours).items():
        if not parameter_name.endswith("k.bias"):  # its true gradient is zero
            assert relative_error(gradient, expected_gradients[parameter_name]) < 1e-4, parameter_name


@pytest.mark.parametrize("preset", ["tiny", "small", "tiny_gpt2", "small_gpt2"])
def test_presets_have_the_parameters_of_their_twins(preset: str) -> None:
    model = replace(compose_config([f"model={preset}"]).config.model, vocab_size=258)
    with torch.device("meta"):
        ours = Transformer(model, PRECISION_TABLES["fp32"], "reference")
        twin = llama_twin(model) if model.norm is NormKind.RMS else gpt2_twin(model)
    assert sum(parameter.numel() for parameter in ours.parameters()) == sum(
        parameter.numel() for parameter in twin.parameters()
    )
