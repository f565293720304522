"""Ranks as threads that meet over one store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore, Store

from llmtrain.dist.meeting import StoreMeeting
from llmtrain.dist.position import Position

Work = Callable[[StoreMeeting], Any]


class Ranks:
    """Threads that meet over one store; `ends` are what their work returned or raised, by rank."""

    def __init__(self, works: list[Work], store: Store | None = None, run_store: Store | None = None) -> None:
        self.store = HashStore() if store is None else store
        self.positions = [Position() for _ in works]
        self.ends: list[Any] = [None] * len(works)
        self.threads = [
            threading.Thread(
                target=self._run,
                args=(work, StoreMeeting(self.store, rank, len(works), self.positions[rank], run_store=run_store)),
                daemon=True,
            )
            for rank, work in enumerate(works)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, work: Work, meeting: StoreMeeting) -> None:
        try:
            self.ends[meeting.rank] = work(meeting)
        except BaseException as error:
            self.ends[meeting.rank] = error

    def wait(self) -> list[Any]:
        for thread in self.threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in self.threads), f"still meeting: {self.ends}"
        return self.ends


def meet(*works: Work) -> list[Any]:
    return Ranks(list(works)).wait()
