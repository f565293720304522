"""A time that a test lets pass, for what ranks know of each other by the age of their beats."""

from __future__ import annotations

import pytest

from llmtrain.dist import beats as beats_module
from llmtrain.dist.beats import Clock


class Time:
    """A clock that the test moves, in steps that a process that runs would see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        self.clocks: list[Clock] = []
        monkeypatch.setattr(beats_module.time, "monotonic", lambda: self.seconds)

    def clock(self) -> Clock:
        self.clocks.append(Clock())
        return self.clocks[-1]

    def passes(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.seconds += 0.5
            for clock in self.clocks:
                clock.now()
