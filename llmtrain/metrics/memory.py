"""Who owns the memory of a training step: a ledger of every tensor storage, by category.

A storage is booked in when an operation makes it, re-booked when it is resized and booked out when it dies. Its category is that
of its maker and never changes; where the maker is known only afterwards (a gradient is an ordinary result until autograd hands it
to its parameter), `adopt` corrects the entry also for the time before. The ledger therefore keeps the events of a window and adds
them up in `summary`, when every category is known.

Nothing is estimated: the total equals what torch's allocator was asked for, except for scratch that lives and dies inside one
operation (on a CPU the packing buffers of a bf16 product, 0.1 to 2 MiB). The cost is Python work per operation, 3 to 11 % of an
update of the presets and more of a smaller one (`scripts/ledger_cost.py`), so a run keeps the ledger for its first two steps only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from llmtrain.dist.torch_private import TorchDispatchMode

Category = Literal["params", "grads", "optimizer", "activations", "loss", "other", "host"]
CATEGORIES: tuple[Category, ...] = ("params", "grads", "optimizer", "activations", "loss", "other", "host")
"""Makers of storages: weights; their gradients; optimizer state; forward and recompute inside blocks; head and loss with their
gradients; everything else; and bytes handed to an offloader, which are no part of the total."""


@dataclass(frozen=True)
class MemorySummary:
    """Bytes of one window."""

    peak_bytes: int
    """Highest total."""
    at_peak: Mapping[str, int]
    """Bytes by category at the instant of the highest total; they sum to `peak_bytes` (`host`, not in the sum, only if there is any)."""
    activations_peak_bytes: int
    """Highest bytes of activations, whenever that was."""
    loss_peak_bytes: int
    """Highest bytes of head and loss, whenever that was."""


class Ledger(Protocol):
    """What a training step tells its ledger; `StorageLedger` listens, `NoLedger` does not."""

    def watch(self, model: nn.Module) -> None:
        """Book the weights of `model`, and from now on its gradients and what its `blocks` compute."""
        ...

    def adopt(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Give the storages of `tensors` a category; those the ledger does not know yet are booked in now."""
        ...

    def window(self) -> AbstractContextManager[None]:
        """Measure what happens inside; `summary` tells the result."""
        ...

    def region(self, category: Category) -> AbstractContextManager[None]:
        """Book new storages under `category`."""
        ...

    def loss(self, hidden: Tensor) -> AbstractContextManager[None]:
        """Around head and loss of a forward; `hidden` is their input, whose gradient ends the loss part of the backward."""
        ...

    def backward(self) -> AbstractContextManager[None]:
        """Around a backward: begins as loss, goes on as other once the gradient of `hidden` is there."""
        ...

    def summary(self) -> MemorySummary | None:
        """Result of the last window; None where it was not measured."""
        ...

    def close(self) -> None:
        """Let go of the model; later windows are not measured."""
        ...


class NoLedger:
    """The ledger that measures nothing."""

    def watch(self, model: nn.Module) -> None:
        pass

    def adopt(self, tensors: Iterable[Tensor], category: Category) -> None:
        pass

    @contextmanager
    def window(self) -> Iterator[None]:
        yield

    @contextmanager
    def region(self, category: Category) -> Iterator[None]:
        yield

    @contextmanager
    def loss(self, hidden: Tensor) -> Iterator[None]:
        yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        yield

    def summary(self) -> MemorySummary | None:
        return None

    def close(self) -> None:
        pass


class _Death(weakref.ref[torch.UntypedStorage]):
    """A weak reference that still knows the key of its storage when that is gone."""

    __slots__ = ("key",)
    key: int


@dataclass(slots=True)
class _Entry:
    """One storage: its category, its size now, and what reports its death."""

    category: Category
    nbytes: int
    death: _Death


class StorageLedger:
    """Measures the memory of training steps on one device.

    Args:
        device: storages elsewhere are not booked (but for `host`).
        num_windows: windows to measure; afterwards the ledger closes itself. None = measure until `close`.
    """

    def __init__(self, device: torch.device, num_windows: int | None = None) -> None:
        self._device_type = device.type
        self._windows_left = num_windows
        self._entries: dict[int, _Entry] = {}
        self._events: list[tuple[_Entry, int]] = []
        self._at_start: list[tuple[_Entry, int]] = []
        self._category: Category = "other"
        self._outside_block: list[Category] = []
        self._hooks: list[Any] = []
        self._measuring = False
        self._measured = False
        self._closed = False

    def watch(self, model: nn.Module) -> None:
        """Book weights and buffers, and hook gradients and blocks.

        The hooks on a block also fire when its forward is repeated in backward, and when that is cut short by an exception, as
        checkpointing does once it has what it needs.
        """
        parameters = list(model.parameters())
        self.adopt(parameters, "params")
        self.adopt(model.buffers(), "other")
        self.adopt([p.grad for p in parameters if p.grad is not None], "grads")
        for parameter in parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient_made))
        for block in model.get_submodule("blocks").children():
            self._hooks.append(block.register_forward_pre_hook(self._enter_block))
            self._hooks.append(block.register_forward_hook(self._leave_block, always_call=True))

    def adopt(self, tensors: Iterable[Tensor], category: Category) -> None:
        assert category in CATEGORIES, category
        for tensor in tensors:
            storage = tensor.untyped_storage()
            entry = self._entries.get(id(storage))
            if entry is not None:
                entry.category = category
            elif category == "host" or tensor.device.type == self._device_type:
                self._book_in(storage, category)

    @contextmanager
    def window(self) -> Iterator[None]:
        """Raises AssertionError when opened inside another window."""
        assert not self._measuring, "one window at a time"
        self._measured = not self._closed
        if self._closed:
            yield
            return
        self._events = []
        self._at_start = [(entry, entry.nbytes) for entry in self._entries.values()]
        self._measuring = True
        try:
            with _Recorder(self._made), _resizes_reported(self._resized):
                yield
        finally:
            self._measuring = False
            self._count_window()

    @contextmanager
    def region(self, category: Category) -> Iterator[None]:
        assert category in CATEGORIES, category
        outer = self._category
        self._category = category
        try:
            yield
        finally:
            self._category = outer

    @contextmanager
    def loss(self, hidden: Tensor) -> Iterator[None]:
        if self._measuring and hidden.requires_grad:
            hidden.register_hook(self._loss_gradient_done)
        with self.region("loss"):
            yield

    def backward(self) -> AbstractContextManager[None]:
        return self.region("loss")

    def summary(self) -> MemorySummary | None:
        if not self._measured:
            return None
        bytes_now: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for entry, nbytes in self._at_start:
            bytes_now[entry.category] += nbytes
        total = sum(bytes_now.values()) - bytes_now["host"]
        peak, at_peak = total, dict(bytes_now)
        activations, loss = bytes_now["activations"], bytes_now["loss"]
        for entry, change in self._events:
            bytes_now[entry.category] += change
            if entry.category != "host":
                total += change
            if total > peak:
                peak, at_peak = total, dict(bytes_now)
            activations = max(activations, bytes_now["activations"])
            loss = max(loss, bytes_now["loss"])
        if not at_peak["host"]:
            del at_peak["host"]
        return MemorySummary(peak, at_peak, activations, loss)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._entries = {}
        self._closed = True

    def _count_window(self) -> None:
        if self._windows_left is not None:
            self._windows_left -= 1
            if self._windows_left == 0:
                self.close()

    def _enter_block(self, block: nn.Module, args: Any) -> None:
        self._outside_block.append(self._category)
        self._category = "activations"

    def _leave_block(self, block: nn.Module, args: Any, output: Any) -> None:
        self._category = self._outside_block.pop()

    def _gradient_made(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.adopt((parameter.grad,), "grads")

    def _loss_gradient_done(self, gradient: Tensor) -> None:
        self._category = "other"

    def _made(self, tensor: Tensor, args: Sequence[Any]) -> None:
        """Look at one result of an operation: a new storage, or one that is known and may have another size now."""
        storage = tensor.untyped_storage()
        entry = self._entries.get(id(storage))
        if entry is not None:
            if entry.nbytes != storage.nbytes():
                self._change(entry, storage.nbytes())
        elif (tensor.device.type == self._device_type or self._category == "host") and not _aliases(storage, args):
            self._book_in(storage, self._category)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._entries.get(id(storage))
        if entry is not None:
            self._change(entry, storage.nbytes())

    def _book_in(self, storage: torch.UntypedStorage, category: Category) -> None:
        # torch keeps one Python object per storage as long as the storage lives, so its id is a key until the reference reports.
        death = _Death(storage, self._died)
        death.key = id(storage)
        entry = self._entries[death.key] = _Entry(category, 0, death)
        self._change(entry, storage.nbytes())

    def _died(self, death: _Death) -> None:
        entry = self._entries.pop(death.key, None)
        if entry is not None:
            self._change(entry, 0)

    def _change(self, entry: _Entry, nbytes: int) -> None:
        if self._measuring and nbytes != entry.nbytes:
            self._events.append((entry, nbytes - entry.nbytes))
        entry.nbytes = nbytes


class _Recorder(TorchDispatchMode):
    """Reports every tensor an operation returns."""

    def __init__(self, made: Callable[[Tensor, Sequence[Any]], None]) -> None:
        super().__init__()
        self._made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._made(result, args)
        elif isinstance(result, (tuple, list)):
            self._all_made(result, args)
        return result

    def _all_made(self, results: Sequence[Any], args: Sequence[Any]) -> None:
        for result in results:
            if isinstance(result, Tensor):
                self._made(result, args)
            elif isinstance(result, (tuple, list)):
                self._all_made(result, args)


def _aliases(storage: torch.UntypedStorage, args: Sequence[Any]) -> bool:
    """Whether a result is a view of an argument, so that its storage was made before the ledger looked."""
    return any(isinstance(arg, Tensor) and arg.untyped_storage() is storage for arg in args)


@contextmanager
def _resizes_reported(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Report `storage.resize_`, which is no operation of the dispatcher (sharded parameters give memory back that way)."""
    resize = torch.UntypedStorage.resize_

    def reporting(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = reporting
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_  # what we covered is inherited
