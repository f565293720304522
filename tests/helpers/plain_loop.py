"""Training written out once more with nothing of llmtrain in it: the reference the framework is measured against.

A decoder as functions of a dict of named weights, the loss of an update as one sum over all its tokens, AdamW spelt out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [B, H, T, C]: channel c is paired with c + C/2."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)


def llama(w: Weights, tokens: Tensor, positions: Tensor, documents: Tensor, *, layers: int, heads: int, eps: float) -> Tensor:
    """Logits [B, T, V] of a Llama-like decoder."""
    batch, length = tokens.shape
    x = w["embed.weight"][tokens]
    visible = (documents[:, :, None] == documents[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    for i in range(layers):
        name = f"blocks.{i}."
        h = rms(x, w[name + "attention_norm.weight"], eps)
        q, k, v = ((h @ w[f"{name}attention.{part}.weight"].T).view(batch, length, heads, -1).transpose(1, 2) for part in "qkv")
        q, k = rotate(q, positions.to(x.dtype), 10000.0), rotate(k, positions.to(x.dtype), 10000.0)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        mixed = scores.masked_fill(~visible[:, None], -math.inf).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).reshape(batch, length, -1) @ w[name + "attention.out.weight"].T
        h = rms(x, w[name + "feed_forward_norm.weight"], eps)
        gate, up = h @ w[name + "feed_forward.gate.weight"].T, h @ w[name + "feed_forward.up.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[name + "feed_forward.down.weight"].T
    return rms(x, w["norm.weight"], eps) @ w["head.weight"].T


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p of all targets that are not -100, over their number."""
    scored = targets != -100
    log_p = logits - logits.exp().sum(-1, keepdim=True).log()
    return -log_p[scored].gather(-1, targets[scored][:, None]).sum() / scored.sum()


class PlainAdamW:
    """AdamW with decay on matrices and clipping by the global norm, one line per quantity."""

    def __init__(self, weights: Weights, *, weight_decay: float, betas: tuple[float, float], eps: float, clip: float) -> None:
        self.weights, self.decay, self.betas, self.eps, self.clip = weights, weight_decay, betas, eps, clip
        self.m = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.v = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.count = 0

    def update(self, loss: Callable[[Weights], Tensor], lr: float) -> tuple[float, float]:
        """One update; returns (loss, norm of the gradient before clipping)."""
        leaves = {name: w.clone().requires_grad_() for name, w in self.weights.items()}
        value = loss(leaves)
        gradients = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
        norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in gradients.values()))
        factor = min(1.0, self.clip / norm)
        self.count += 1
        b1, b2 = self.betas
        for name, weight in self.weights.items():
            g = gradients[name] * factor
            self.m[name] = b1 * self.m[name] + (1 - b1) * g
            self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
            m, v = self.m[name] / (1 - b1**self.count), self.v[name] / (1 - b2**self.count)
            decayed = weight * (1 - lr * self.decay) if weight.ndim >= 2 else weight
            self.weights[name] = decayed - lr * m / (v.sqrt() + self.eps)
        return value.item(), norm
