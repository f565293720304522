"""The learning rate in force during update k, in closed form.

Updates are counted 1 … N. W is the warm-up length, P = max(W, 1) the update at which the peak is reached exactly, `floor` the last
learning rate:

    k <= P                      peak * k / P
    constant, k > P             peak
    linear,   k > P             peak + (floor - peak) * t             t = (k - P) / (N - P)
    cosine,   k > P             floor + (peak - floor) * (1 + cos(pi t)) / 2
    wsd,      P < k <= N - D    peak
    wsd,      k > N - D         peak + (floor - peak) * (k - (N - D)) / D

So the first update has a learning rate above 0, the last one is at the floor, and no phase of length 0 or 1 is special. Two corners
follow from the same lines: a run that is all warm-up (P = N) ends at the peak, and so does wsd with D = 0. The cosine is that of
Loshchilov and Hutter 2017 (SGDR, eq. 5, one cycle); wsd that of Hu et al. 2024 (MiniCPM) with a linear decay.
"""

from __future__ import annotations

import math

from llmtrain.config.typed import ScheduleKind
from llmtrain.plan.plan import SchedulePlan


def learning_rate(schedule: SchedulePlan, update: int) -> float:
    """Learning rate of update `update` (1 … schedule.steps); updates past the end keep the last value."""
    assert update >= 1
    peak_update = max(schedule.warmup_steps, 1)
    if update <= peak_update:
        return schedule.peak_lr * update / peak_update
    match schedule.kind:
        case ScheduleKind.CONSTANT:
            return schedule.peak_lr
        case ScheduleKind.LINEAR:
            return _between(schedule, _share(update, peak_update, schedule.steps))
        case ScheduleKind.COSINE:
            share = _share(update, peak_update, schedule.steps)
            return _between(schedule, (1 - math.cos(math.pi * share)) / 2)
        case ScheduleKind.WSD:
            return _between(schedule, _share(update, schedule.steps - schedule.decay_steps, schedule.steps))


def _share(update: int, start: int, end: int) -> float:
    """How much of the way from `start` to `end` is done, in [0, 1]."""
    if update <= start:
        return 0.0
    return min((update - start) / (end - start), 1.0) if end > start else 1.0


def _between(schedule: SchedulePlan, share: float) -> float:
    """The value `share` of the way from the peak down to the floor; both ends exact."""
    if share >= 1.0:
        return schedule.min_lr
    return schedule.peak_lr + (schedule.min_lr - schedule.peak_lr) * share
