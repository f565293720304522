"""Sampling text from a model, one token at a time, with a key-value cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.typed import GenerateConfig
from llmtrain.model.cache import KVCache
from llmtrain.model.transformer import Transformer


def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    settings: GenerateConfig,
    *,
    eos_ids: frozenset[int],
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Continue a prompt.

    The model sees at most `max_positions` tokens. When they are used up, the newest half of them is read again as a new context
    and generation goes on; a prompt that is longer by itself is refused rather than cut.

    Args:
        prompt_ids: at least one token.
        settings: length, temperature (0 = always the likeliest token), top_k, top_p, seed.
        eos_ids: tokens that end the text (they are not given out); empty = never ends early.
        vocab_size: size of the tokenizer's vocabulary; rows of a larger, padded embedding are never sampled.

    Yields:
        up to `settings.max_tokens` token ids.

    Raises:
        ConfigError: the prompt is empty or longer than the model's positions.
    """
    window = model.config.max_positions
    if not 1 <= len(prompt_ids) <= window:
        raise ConfigError(
            Problem(
                f"generate.prompt of {len(prompt_ids)} tokens",
                f"the model reads 1 to {window} tokens at once (model.max_positions)",
                cure=f"a prompt of at most {window} tokens"
                if prompt_ids
                else "a prompt, or a tokenizer with a begin-of-text token",
            )
        )
    device = model.head_weight.device
    cache = KVCache(
        model.config,
        model.precision,
        batch_size=1,
        capacity=min(window, len(prompt_ids) + settings.max_tokens),
        device=device,
    )
    generator = torch.Generator("cpu").manual_seed(settings.seed)
    history, unread = list(prompt_ids), len(prompt_ids)
    for _ in range(settings.max_tokens):
        if cache.length + unread > window:
            cache.clear()
            unread = max(1, window // 2)
        scores = _next_scores(model, torch.tensor([history[-unread:]], device=device), cache)  # [V]
        token = sample(scores[:vocab_size], settings, generator)
        if token in eos_ids:
            return
        yield token
        history.append(token)
        unread = 1


@torch.no_grad()
def _next_scores(model: Transformer, tokens: Tensor, cache: KVCache) -> Tensor:
    """Scores [V] of the token that follows, fp32 on the CPU."""
    training = model.training
    model.eval()
    hidden = model(tokens, cache=cache)  # [1, T, D]
    model.train(training)
    return model.logits(hidden[0, -1]).float().cpu()


def sample(scores: Tensor, settings: GenerateConfig, generator: torch.Generator) -> int:
    """Draw a token id from scores [V], after temperature, top_k and top_p (Holtzman et al. 2020), in that order."""
    if settings.temperature == 0:
        return int(scores.argmax())
    # The best score becomes 0 and no quotient is above it, however low the temperature, which fp32 may not even tell from 0.
    scores = ((scores - scores.max()).double() / settings.temperature).float()
    if settings.top_k is not None and settings.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(settings.top_k).values[-1], -math.inf)
    probabilities = scores.softmax(dim=-1)
    if settings.top_p is not None:
        probabilities = _nucleus(probabilities, settings.top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keep the fewest likeliest tokens that together hold at least `top_p`; the likeliest one always stays."""
    ordered, order = probabilities.sort(descending=True)
    before = ordered.cumsum(dim=-1) - ordered  # probability held by likelier tokens
    return torch.zeros_like(probabilities).scatter(0, order, ordered.masked_fill(before >= top_p, 0.0))
