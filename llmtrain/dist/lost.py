"""Whose end broke a collective: any rank asks, the one that judges answers through the store, the same for all.

That one reads all records all the time. A thousand ranks that each did so to find out by themselves would keep the store from
answering any, and then everybody would seem lost.
"""

from __future__ import annotations

from llmtrain.dist.beats import SILENT_SECONDS, Beats, Clock, StoreLine

LOST_SECONDS = 10.0
"""Longest look for the lost rank while more than one may be it: time in which a live one speaks again."""
ASK_SECONDS = LOST_SECONDS + 3 * SILENT_SECONDS
"""Longest wait for an answer. When the judge is lost itself, up to two times of silence go by until another one judges."""
NOBODY = -1

_ASKED_KEY = "watch/asked"
_LOST_KEY = "watch/lost"


class LostRank:
    """The question of one rank and, where it judges, its answer."""

    def __init__(self, line: StoreLine, clock: Clock, beats: Beats) -> None:
        self._line = line
        self._clock = clock
        self._beats = beats
        self._asked_at: float | None = None
        self.found: int | None = None
        """The lost rank once it has been named to this one, which has asked; NOBODY when all answer."""

    @property
    def is_looked_for(self) -> bool:
        """Whether this rank judges and has been asked."""
        return self._asked_at is not None

    def ask(self) -> None:
        """Ask, and take the answer if it has come; called again and again."""
        self._line.set(_ASKED_KEY, "")
        if self.found is None and self._line.check(_LOST_KEY):
            found = int(self._line.get(_LOST_KEY))
            # For who wants to say where it was.
            self._beats.read([] if found == NOBODY else [found])
            self.found = found

    def look(self) -> None:
        """Answer if somebody has asked and it is clear; called by the judge each time it has read all records.

        The lost rank is one of those that have no beat from after the question. As long as there are several, some may be live
        ones that only could not run their threads, as while native code holds Python's lock: they have time to speak again.
        """
        if self._asked_at is None:
            if not self._line.check(_ASKED_KEY):
                return
            self._asked_at = self._clock.now()
        waited = self._clock.now() - self._asked_at
        suspects = self._beats.unseen_since(self._asked_at)
        silent = [rank for rank in suspects if self._beats.is_silent(rank)]
        is_clear = len(suspects) == 1 and bool(silent) or not suspects and waited > SILENT_SECONDS
        if is_clear or waited > LOST_SECONDS:
            found = max(silent, key=self._beats.silent_seconds, default=NOBODY)
            self._line.keep_first(_LOST_KEY, str(found))
