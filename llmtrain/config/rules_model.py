"""Rules between the keys of a model and its attention."""

from __future__ import annotations

from llmtrain.config import schema
from llmtrain.config.declare import AUTO
from llmtrain.config.errors import Problem
from llmtrain.config.keys import leaves
from llmtrain.config.suggest import divisors_near, either, multiples_near

KERNELS = {"sdpa": ("flash", "memory_efficient", "cudnn", "math"), "flash_attn": ("fa2", "fa3", "fa4")}
"""By attention backend, the kernels that can be named; the other backends have one way to compute."""


def heads_divide_the_width(wire: schema.Config) -> Problem | None:
    dim, heads = wire.model.dim, wire.model.attention.num_heads
    if wire.model.attention.head_dim is not None or dim % heads == 0:
        return None
    near = [f"model.dim={value}" for value in multiples_near(dim, heads)]
    near += [f"model.attention.num_heads={value}" for value in divisors_near(dim, heads)]
    rule = f"divisible by model.attention.num_heads = {heads} unless model.attention.head_dim is given"
    return Problem(f"model.dim={dim}", rule, either(near))


def kv_heads_divide_the_heads(wire: schema.Config) -> Problem | None:
    heads, kv_heads = wire.model.attention.num_heads, wire.model.attention.num_kv_heads
    if kv_heads is None or heads % kv_heads == 0:
        return None
    near = either(f"model.attention.num_kv_heads={value}" for value in divisors_near(heads, kv_heads))
    return Problem(f"model.attention.num_kv_heads={kv_heads}", f"divides model.attention.num_heads = {heads}", near)


def rotary_turns_pairs_of_channels(wire: schema.Config) -> Problem | None:
    model, shape = wire.model, wire.model.attention
    head_dim = shape.head_dim or model.dim // shape.num_heads
    whole = shape.head_dim is not None or model.dim % shape.num_heads == 0
    if model.position != "rotary" or head_dim % 2 == 0 or not whole:
        return None
    cure = either(f"model.attention.head_dim={value}" for value in (head_dim - 1, head_dim + 1) if value > 0)
    return Problem(
        f"model.attention.head_dim={head_dim}", "even with model.position=rotary", f"{cure}, or model.position=learned"
    )


def longest_text_covers_a_sequence(wire: schema.Config) -> Problem | None:
    rows, length = wire.model.max_positions, wire.data.sequence_length
    if isinstance(rows, str) or rows >= length:
        return None
    cure = f"model.max_positions={length} or data.sequence_length={rows}"
    return Problem(f"model.max_positions={rows}", f"at least data.sequence_length = {length}", cure)


def theta_needs_rotary_positions(wire: schema.Config) -> Problem | None:
    theta, default = wire.model.rope.theta, leaves()["model.rope.theta"].default
    if wire.model.position == "rotary" or theta == default:
        return None
    rule = f"only model.position=rotary reads it; model.position is {wire.model.position}"
    return Problem(f"model.rope.theta={theta:g}", rule, f"model.position=rotary or model.rope.theta={default:g}")


def attention_dropout_needs_the_reference_backend(wire: schema.Config) -> Problem | None:
    dropout, backend = wire.model.dropout.attention, wire.attention.backend
    if dropout == 0 or backend in ("reference", AUTO):
        return None
    rule = f"only attention=reference drops attention weights by counted random numbers; attention.backend is {backend}"
    return Problem(f"model.dropout.attention={dropout:g}", rule, "attention=reference or model.dropout.attention=0")


def scaling_needs_rotary_positions(wire: schema.Config) -> Problem | None:
    kind = wire.model.rope.scaling.kind
    if wire.model.position == "rotary" or kind == "none":
        return None
    rule = f"only model.position=rotary has frequencies to stretch; model.position is {wire.model.position}"
    return Problem(f"model.rope.scaling.kind={kind}", rule, "model.position=rotary or model.rope.scaling.kind=none")


def rope_scaling_is_complete(wire: schema.Config) -> Problem | None:
    scaling = wire.model.rope.scaling
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "original_max_positions"),
        "yarn": ("factor", "original_max_positions"),
    }
    for name in needed.get(scaling.kind, ()):
        if getattr(scaling, name) is None:
            example = "8" if name == "factor" else "8192"
            return Problem(f"model.rope.scaling.kind={scaling.kind}", f"needs {name}", f"model.rope.scaling.{name}={example}")
    return None


def rope_ramp_rises(wire: schema.Config) -> Problem | None:
    scaling = wire.model.rope.scaling
    if scaling.kind == "llama3":
        names, low, high = (
            ("low_freq_factor", "high_freq_factor"),
            scaling.low_freq_factor or 1.0,
            scaling.high_freq_factor or 4.0,
        )
    elif scaling.kind == "yarn":
        names, low, high = ("beta_slow", "beta_fast"), scaling.beta_slow or 1.0, scaling.beta_fast or 32.0
    else:
        return None
    if low < high:
        return None
    rule = f"below model.rope.scaling.{names[1]} = {high:g}: frequencies between the two are mixed"
    return Problem(f"model.rope.scaling.{names[0]}={low:g}", rule, f"model.rope.scaling.{names[1]}={2 * low:g}")


def window_pattern_has_two_letters(wire: schema.Config) -> Problem | None:
    pattern = wire.model.attention.window_pattern
    if pattern is None or (pattern and not set(pattern) - set("SL")):
        return None
    rule = "letters S (sees model.attention.window keys) and L (sees all)"
    return Problem(f"model.attention.window_pattern={pattern}", rule, "model.attention.window_pattern=SSSL")


def windows_are_used(wire: schema.Config) -> Problem | None:
    window, pattern = wire.model.attention.window, wire.model.attention.window_pattern
    if window is None and pattern is not None:
        rule = "says which layers are short, and model.attention.window, how short, is not given"
        return Problem(f"model.attention.window_pattern={pattern}", rule, "model.attention.window=128")
    if window is not None and pattern is not None and not set(pattern[: wire.model.num_layers]) & {"S"}:
        rule = f"no layer of model.attention.window_pattern={pattern} is short"
        return Problem(f"model.attention.window={window}", rule, "model.attention.window_pattern=S, or leave both out")
    return None


def kernel_belongs_to_the_backend(wire: schema.Config) -> Problem | None:
    backend, kernel = wire.attention.backend, wire.attention.kernel
    if kernel == AUTO or kernel in KERNELS.get(backend, ()):
        return None
    owner = next(name for name, kernels in KERNELS.items() if kernel in kernels)
    rule = f"a kernel of attention={owner}; attention.backend is {backend}"
    return Problem(f"attention.kernel={kernel}", rule, f"attention={owner} or attention.kernel=auto")
