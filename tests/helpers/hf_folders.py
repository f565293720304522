"""Tiny models of the transformers library, saved as it saves them; importing this skips the test where it is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LENGTH = 512
TEXT = (
    "the quick brown fox jumps over the lazy dog; a model that reads this text learns little. Zwölf Boxkämpfer, 123 ½ x += 1\n"
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}

SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "attn_implementation": "eager",
}


def llama(**keys: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | keys))


def qwen3(**keys: Any) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL | {"head_dim": 16} | keys))


def gpt2(**keys: Any) -> Any:
    shape = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "attn_implementation": "eager"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape | keys))


def default_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


MODELS: dict[str, Any] = {
    "llama": lambda **k: llama(head_dim=16, rms_norm_eps=1e-5, rope_parameters=default_rope(500000.0), **k),
    "llama tied, llama3 rope": lambda **k: llama(head_dim=16, tie_word_embeddings=True, rope_parameters=LLAMA3, **k),
    "llama with biases, linear rope": lambda **k: llama(
        attention_bias=True, mlp_bias=True, rope_parameters=default_rope(1e4) | {"rope_type": "linear", "factor": 2.0}, **k
    ),
    "llama, yarn": lambda **k: llama(rope_parameters=YARN, **k),
    "smollm2": lambda **k: llama(tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters=default_rope(1e5), **k),
    "qwen3": lambda **k: qwen3(tie_word_embeddings=True, rope_parameters=default_rope(1e6), **k),
    "qwen3 with windows": lambda **k: qwen3(
        num_hidden_layers=3, attention_bias=True, use_sliding_window=True, sliding_window=40, max_window_layers=1, **k
    ),
    "gpt2": gpt2,
    "gpt2 untied": lambda **k: gpt2(tie_word_embeddings=False, n_inner=64, layer_norm_epsilon=1e-6, **k),
}


def make_tokenizer() -> Any:
    """A byte-level BPE with marks, as transformers saves it; it puts `<s>` in front of a text unless told otherwise."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([TEXT] * 3, trainer)
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def shaken(model: Any) -> Any:
    """Every parameter moved, biases and norms too, so that none can be mixed up unseen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def save_folder(folder: Path, name: str, *, with_tokenizer: bool = True, **keys: Any) -> Any:
    """Save one of MODELS and perhaps a tokenizer into `folder`; the model is given back."""
    tokenizer = make_tokenizer()
    ids = {"vocab_size": len(tokenizer) + 5, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = shaken(MODELS[name](**ids | keys))
    model.save_pretrained(folder)
    if with_tokenizer:
        tokenizer.save_pretrained(folder)
    return model
