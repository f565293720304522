"""The learning rate against the lines of docs/schedules.md, written out again here update by update."""

import itertools
import math

import pytest

from llmtrain.config.typed import ScheduleKind
from llmtrain.optim.schedule import learning_rate
from llmtrain.plan.plan import SchedulePlan

PEAK, FLOOR = 3e-4, 3e-5


def expected(kind: str, update: int, steps: int, warmup: int, decay: int) -> float:
    peak_update = max(warmup, 1)
    if update <= peak_update:
        return PEAK * update / peak_update
    if kind == "constant":
        return PEAK
    if kind == "wsd":
        if update <= steps - decay:
            return PEAK
        return PEAK + (FLOOR - PEAK) * (update - (steps - decay)) / decay
    share = (update - peak_update) / (steps - peak_update)
    if kind == "linear":
        return PEAK * (1 - share) + FLOOR * share
    return FLOOR + (PEAK - FLOOR) * 0.5 * (1 + math.cos(math.pi * share))


def cases():
    for kind, steps, warmup, decay in itertools.product(ScheduleKind, range(1, 13), range(6), range(6)):
        if warmup + decay <= steps and (kind is ScheduleKind.WSD or decay == 0):
            yield SchedulePlan(kind, PEAK, PEAK if kind is ScheduleKind.CONSTANT else FLOOR, steps, warmup, decay)


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_b22_every_update_matches_the_closed_form(kind):
    checked = 0
    for plan in (plan for plan in cases() if plan.kind is kind):
        trace = [learning_rate(plan, update) for update in range(1, plan.steps + 1)]
        for update, lr in enumerate(trace, 1):
            want = expected(kind.value, update, plan.steps, plan.warmup_steps, plan.decay_steps)
            assert lr == pytest.approx(want, rel=1e-12), (plan, update)
        assert trace[0] > 0
        assert max(trace) == PEAK
        assert min(trace) >= 0
        checked += len(trace)
    assert checked > 200


@pytest.mark.parametrize("kind", [ScheduleKind.LINEAR, ScheduleKind.COSINE, ScheduleKind.WSD])
def test_b22_last_update_is_exactly_at_the_floor(kind):
    for plan in (plan for plan in cases() if plan.kind is kind):
        falls = plan.steps > max(plan.warmup_steps, 1) and (kind is not ScheduleKind.WSD or plan.decay_steps > 0)
        assert learning_rate(plan, plan.steps) == (FLOOR if falls else PEAK), plan


def test_updates_past_the_end_keep_the_last_value():
    plan = SchedulePlan(ScheduleKind.COSINE, PEAK, FLOOR, 10, 2, 0)
    assert learning_rate(plan, 11) == learning_rate(plan, 1000) == FLOOR
