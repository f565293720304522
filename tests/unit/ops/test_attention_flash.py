"""The FlashAttention packages are given what their documentation asks for; what they compute is only checked on CUDA (tests/gpu)."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.attention import STAND_IN, attend, documents, heads
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llmtrain.config.errors import ConfigError
from llmtrain.ops.attention import attention_backend
from llmtrain.ops.attention_flash import MODULES, document_starts, load_flash_library, registered_operations
from llmtrain.plan.attention import ATTENTION


def starts_in_loops(rows: list[list[int]]) -> list[int]:
    starts, place = [], 0
    for row in rows:
        for column, document in enumerate(row):
            if column == 0 or document != row[column - 1]:
                starts.append(place)
            place += 1
    return [*starts, place]


@given(
    st.integers(1, 9).flatmap(
        lambda length: st.lists(st.lists(st.integers(-1, 2), min_size=length, max_size=length), min_size=1, max_size=4)
    )
)
def test_document_starts(rows: list[list[int]]) -> None:
    """Padding (-1) is a document; a document ends with its row even when the next row begins with the same id."""
    found = document_starts(torch.tensor(rows))
    assert found.dtype is torch.int32 and found.tolist() == starts_in_loops(rows)


class Recorder:
    """A module of the package that writes down how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[tuple[int, ...]], dict[str, Any]]] = []

    def module(self, name: str) -> ModuleType:
        module = ModuleType(name)
        for function in ("flash_attn_func", "flash_attn_varlen_func"):
            setattr(module, function, self._record(function))
        return module

    def _record(self, function: str) -> Any:
        def record(*tensors: Tensor, **options: Any) -> Tensor:
            self.calls.append((function, [tuple(tensor.shape) for tensor in tensors], options))
            return tensors[0]

        return record


@pytest.mark.parametrize("kernel", MODULES)
def test_calls_of_an_installed_package(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "flash_attn", recorder.module("flash_attn"))
    monkeypatch.setitem(sys.modules, MODULES[kernel], recorder.module(MODULES[kernel]))
    backend = attention_backend("flash_attn", kernel=kernel)
    query, key, value = heads(4, 7), heads(2, 7), heads(2, 7)
    assert attend(backend, query, key, value, window=3).shape == query.shape
    assert attend(backend, query, key, value, document_ids=documents(2, 3, 4)).shape == query.shape
    dense, packed = recorder.calls
    assert dense == (
        "flash_attn_func",
        [(2, 7, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)],
        {"causal": True, "window_size": (2, 0), "deterministic": False},
    )
    assert packed[:2] == ("flash_attn_varlen_func", [(14, 4, 8), (14, 2, 8), (14, 2, 8)])
    assert packed[2]["window_size"] == (-1, -1) and packed[2]["cu_seqlens_q"].tolist() == [0, 3, 7, 10, 14]
    assert packed[2]["max_seqlen_q"] == packed[2]["max_seqlen_k"] == 4


def test_deterministic_runs_ask_for_deterministic_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "flash_attn", recorder.module("flash_attn"))
    torch.use_deterministic_algorithms(True)
    try:
        attend(attention_backend("flash_attn", kernel="fa2"), heads(2, 4), heads(2, 4), heads(2, 4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert recorder.calls[0][2]["deterministic"] is True


def test_without_the_package_it_says_what_to_install() -> None:
    packages = {way.name: way.package for way in ATTENTION["flash_attn"].kernels}
    assert list(packages) == list(MODULES)
    with pytest.raises(ConfigError, match="pip install flash-attn"):
        attention_backend("flash_attn")
    for kernel, package in packages.items():
        with pytest.raises(ConfigError, match=f"attention.kernel={kernel}(.|\n)*{package} cannot be imported"):
            load_flash_library(kernel)
    assert registered_operations() == frozenset()


def test_registered_forwards_are_found() -> None:
    library = torch.library.Library("flash_attn", "FRAGMENT")
    library.define("_flash_attn_forward(Tensor query) -> Tensor")
    assert registered_operations() == {torch.ops.flash_attn._flash_attn_forward.default}
    del torch.ops.flash_attn._flash_attn_forward
    library._destroy()
    assert registered_operations() == frozenset()


def test_the_stand_in_refuses_lengths_that_are_not_those_of_the_rows() -> None:
    """What the matrix of test_attention.py relies on."""
    flat = torch.randn(6, 2, 8)
    wrong = torch.tensor([0, 3, 5], dtype=torch.int32)
    with pytest.raises(AssertionError):
        STAND_IN.attend_packed(
            flat,
            flat,
            flat,
            cu_seqlens_q=wrong,
            cu_seqlens_k=wrong,
            max_seqlen_q=3,
            max_seqlen_k=3,
            causal=True,
            window_size=(-1, -1),
        )
