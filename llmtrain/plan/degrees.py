"""Ranks along each mesh axis: fills in the one axis that is `auto` and refuses a product that is not the world size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import log2, prod

from llmtrain.config.errors import PlanError, Problem
from llmtrain.config.suggest import divisors
from llmtrain.config.typed import ParallelismConfig
from llmtrain.plan.plan import Choice, Degrees, Machine

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


def settle_degrees(parallelism: ParallelismConfig, machine: Machine) -> tuple[Degrees, list[Choice]]:
    """Degrees whose product is `machine.world_size`; a data axis that is None takes what the others leave.

    Raises:
        PlanError: two axes are auto, or the product does not fit; names the nearest degrees that do.
    """
    asked: dict[str, int | None] = {axis: getattr(parallelism, axis) for axis in AXES}
    autos = [axis for axis in AXES if asked[axis] is None]
    if len(autos) > 1:
        what = " ".join(f"parallelism.{axis}=auto" for axis in autos)
        raise PlanError(
            Problem(what, "at most one data axis takes what is left of the world size", f"parallelism.{autos[-1]}=1")
        )
    world, fixed = machine.world_size, prod(degree for degree in asked.values() if degree is not None)
    fits = world % fixed == 0 if autos else world == fixed
    if not fits:
        raise PlanError(_misfit(asked, fixed, machine))
    settled = {axis: world // fixed if degree is None else degree for axis, degree in asked.items()}
    reason = f"what is left of world size {world} ({machine.world_source})"
    return Degrees(**settled), [Choice(f"parallelism.{axis}", str(settled[axis]), reason) for axis in autos]


def nearest_degrees(asked: Mapping[str, int | None], world_size: int) -> dict[str, int]:
    """The legal degrees that change the fewest of the asked ones, then the least by ratio, then data axes before the others."""

    def distance(degrees: Iterable[int]) -> tuple[int, float, list[int]]:
        pairs = list(zip(degrees, (asked[axis] for axis in AXES), strict=True))
        changed = [index for index, (new, old) in enumerate(pairs) if old is not None and new != old]
        ratio = sum(abs(log2(new / old)) for new, old in pairs if old is not None)
        return len(changed), round(ratio, 9), changed

    return dict(zip(AXES, min(_factorizations(world_size, len(AXES)), key=distance), strict=True))


def _misfit(asked: Mapping[str, int | None], fixed: int, machine: Machine) -> Problem:
    given = {axis: degree for axis, degree in asked.items() if degree is not None}
    what = " ".join(f"parallelism.{axis}={degree}" for axis, degree in given.items() if degree != 1)
    verb = "divide" if len(given) < len(AXES) else "equal"
    product = " × ".join(f"{axis} {degree}" for axis, degree in given.items())
    nearest = nearest_degrees(asked, machine.world_size)
    cure = " ".join(f"parallelism.{axis}={nearest[axis]}" for axis, degree in given.items() if nearest[axis] != degree)
    return Problem(
        what or f"world size {machine.world_size} ({machine.world_source})",
        f"{product} = {fixed} must {verb} the world size {machine.world_size} ({machine.world_source})",
        f"{cure}, which gives {' × '.join(f'{axis} {degree}' for axis, degree in nearest.items())}",
    )


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every ordered way to write `number` as a product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in _factorizations(number // first, parts - 1):
            yield (first, *rest)
