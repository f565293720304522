"""Random command lines and files: never anything but a config or a ConfigError, and what is accepted is exactly what was typed."""

from __future__ import annotations

import random
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.compose import compose_config, config_from_wire, group_options
from llmtrain.config.errors import ConfigError
from llmtrain.config.files import Folders
from llmtrain.config.keys import KeyInfo, ValueKind, leaves
from llmtrain.config.settle import flatten
from llmtrain.config.sweep import expand_sweep

pytestmark = pytest.mark.usefixtures("remembered_files")

NUM_OVERRIDES = 500
SCRAPS = [
    *(
        "1e3",
        "1000.0",
        "0",
        "-1",
        "1",
        "2",
        "7",
        "64",
        "1_000",
        "1e400",
        "1e-400",
        "010",
        "0x1F",
        "+5",
        "5.",
        ".5",
        "1e",
        "9" * 30,
    ),
    *(
        "nan",
        "-inf",
        "true",
        "FALSE",
        "yes",
        "null",
        "NULL",
        "~",
        "auto",
        "none",
        "full",
        "bf16",
        "fp61",
        "",
        " ",
        " 3 ",
        "a,b",
        "1,2",
    ),
    *(
        "[a,b]",
        "[matmul]",
        "[]",
        "{}",
        "{a:1}",
        "[1,",
        "'q'",
        '"q"',
        "'",
        "a'b",
        "\\",
        "a\\,b",
        "\\${x}",
        "${x}",
        "${train.steps}",
    ),
    *(
        "${oc.env:HOME}",
        "${run.seed}",
        "${",
        "${}",
        "${a",
        "range(1,3)",
        "range(1,3,0)",
        "int(3)",
        "choice(a,b)",
        "glob(*)",
        "f(x)",
    ),
    *(
        "a b",
        "a=b",
        "=",
        "ünï",
        "日本",
        "\udcff",
        "\n",
        "a\x00b",
        "#c",
        "x" * 300,
        "../x",
        "/tmp/x",
        "a:b",
        "@",
        "%",
        "!!str x",
        "- a",
    ),
]


def draw_word(rng: random.Random) -> str:
    """An override that is right more often than not."""
    sign = rng.choice(["", "", "", "", "+", "++", "~"])
    if rng.random() < 0.25:
        options = group_options()
        group = rng.choice(list(options))
        return f"{sign}{group}={rng.choice([*options[group], *SCRAPS] if rng.random() < 0.3 else [*options[group], 'none'])}"
    info = rng.choice(list(leaves().values()))
    name = info.name if rng.random() < 0.95 else info.name[:-1]
    return f"{sign}{name}={draw_text(info, rng) if rng.random() < 0.7 else rng.choice(SCRAPS)}"


def draw_text(info: KeyInfo, rng: random.Random) -> str:
    """A value of the right kind, mostly inside its range."""
    if info.auto and rng.random() < 0.3:
        return "auto"
    if info.kind is ValueKind.WHOLE:
        return rng.choice(["1", "2", "16", "256", "512", "1e3", str(rng.randrange(2**33))])
    if info.kind is ValueKind.NUMBER:
        return rng.choice(["0", "1", "0.5", f"{rng.random():.3e}", repr(rng.random())])
    if info.kind is ValueKind.SWITCH:
        return rng.choice(["true", "false", "True"])
    if info.kind is ValueKind.LIST:
        return f"[{','.join(rng.sample(['attention', 'matmul', 'norm', 'activation'], rng.randrange(4)))}]"
    return (
        rng.choice([*info.choices, *info.later]) if info.choices or info.later else rng.choice(["run7", "1e5", "true", "a.b-c"])
    )


def means(info: KeyInfo, text: str, value: Any) -> bool:
    """Whether `value` is what `text` says, worked out apart from the code under test."""
    bare = text.strip()
    if value is None:
        return info.optional and bare.lower() == "null"
    if value == "auto" and info.auto:
        return bare == "auto"
    if info.kind is ValueKind.WHOLE:
        return type(value) is int and Decimal(bare.replace("_", "")) == value
    if info.kind is ValueKind.NUMBER:
        return type(value) is float and float(bare.replace("_", "")) == value
    if info.kind is ValueKind.SWITCH:
        return type(value) is bool and bare.lower() == str(value).lower()
    if info.kind is ValueKind.LIST:
        return f"[{','.join(value)}]" == bare
    if info.kind is ValueKind.MAP:
        return value == {} and bare == "{}"
    quoted = len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\""
    return value == (bare if info.choices else bare[1:-1] if quoted else text)


def expected_texts(words: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """What options of the words set, and the text of each key that a word sets."""
    from_options, from_words = {}, {}
    for word in words:
        key, _, text = word.lstrip("+").partition("=")
        if key in leaves():
            from_words[key] = text
        elif text.strip() != "[]":
            said = yaml.safe_load((Folders().shipped / key / f"{text.strip()}.yaml").read_text(encoding="utf-8"))
            from_options |= dict(flatten(said if key == "experiment" else {key: said}))
    return from_options, from_words


def test_500_overrides_are_honoured_exactly_or_refused() -> None:
    rng = random.Random(56)
    default = dict(flatten(compose_config([]).wire))
    overrides = accepted = 0
    while overrides < NUM_OVERRIDES:
        words = [draw_word(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        overrides += len(words)
        try:
            composed = compose_config(words)
        except ConfigError as error:
            assert error.problems and str(error).encode()
            continue
        accepted += 1
        assert config_from_wire(composed.wire) == composed.config
        wire = dict(flatten(composed.wire))
        if any(word.startswith(("experiment=", "+experiment=", "++experiment=")) for word in words):
            continue
        from_options, from_words = expected_texts(words)
        for key, text in from_words.items():
            if "${" not in text and "\\" not in text:
                assert means(leaves()[key], text, wire[key]), (words, key, wire[key])
        for key, value in from_options.items():
            spelled = float(value) if leaves()[key].kind is ValueKind.NUMBER else value
            assert key in from_words or wire[key] == spelled, (words, key)
        changed = {key for key in wire if wire[key] != default[key]}
        assert changed <= {*from_options, *from_words}, words
    assert accepted > NUM_OVERRIDES // 8, "the fuzz must also meet configs that are fine"


PIECES = st.one_of(st.sampled_from([*leaves(), *group_options(), *SCRAPS, "=", ",", ".", "+", "~", "@"]), st.text(max_size=8))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.lists(PIECES, max_size=5).map("".join), max_size=3))
def test_any_words_give_a_config_or_a_config_error(words: list[str]) -> None:
    for run in (compose_config, expand_sweep):
        try:
            run(words)
        except ConfigError as error:
            assert str(error).encode()


LINES = st.sampled_from(
    [
        *(
            "defaults:",
            "  - train",
            "  - _self_",
            "  - override /data: [text]",
            "  - data: synthetic",
            "  - model: tiny",
            "train:",
            "  steps: 5",
        ),
        *(
            "  tokens: 1e4",
            "  steps: [1",
            "model:",
            "  attention:",
            "    num_heads: 3",
            "  dim: *a",
            "  dim: &a 64",
            "run: {name: 1e5}",
            "- x",
        ),
        *(
            "recompute: selective",
            "recompute: {keep: [matmul]}",
            "? [a]",
            ": b",
            "!!python/name:os",
            "\t",
            "%YAML 9",
            "---",
            "...",
            "# @package",
        ),
    ]
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(LINES, min_size=1, max_size=8))
def test_any_file_gives_a_config_or_a_config_error(lines: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.yaml").write_text("\n".join(lines), encoding="utf-8")
        try:
            compose_config([], config_name="mine", config_dirs=[Path(folder)])
        except ConfigError as error:
            assert str(error)
