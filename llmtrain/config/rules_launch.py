"""Rules between the keys that say on how many ranks a run trains, and with what around it."""

from __future__ import annotations

import re

from llmtrain.config import schema
from llmtrain.config.declare import AUTO
from llmtrain.config.defaults import DEFAULT_BUCKET_MIB
from llmtrain.config.errors import Problem
from llmtrain.config.key_info import value_of

OTHER_AXES = ("parallelism.dp_shard", "parallelism.cp", "parallelism.tp", "parallelism.pp")
"""Degrees of layouts that are not built yet."""

OWN_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|LOCAL_WORLD_SIZE|(SLURM|TORCHELASTIC|LLMTRAIN)_.*"
)
"""Environment variables that say which process of a run this is."""
SECRETS = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(_|$)|API_?KEY", re.IGNORECASE)


def one_data_axis_only(wire: schema.Config, name: str) -> Problem | None:
    degree = value_of(wire, name)
    if not isinstance(degree, int) or degree == 1:
        return None
    return Problem(f"{name}={degree}", "not available in this version, whose ranks keep whole copies", f"{name}=1")


def ddp_keeps_whole_copies(wire: schema.Config) -> Problem | None:
    if wire.parallelism.dp_shard != AUTO:
        return None
    rule = "parallelism=ddp keeps a whole copy on every rank: dp_replicate takes the ranks, dp_shard is 1"
    return Problem("parallelism.dp_shard=auto", rule, "parallelism.dp_shard=1")


def first_bucket_is_no_larger(wire: schema.Config) -> Problem | None:
    first, bucket = wire.parallelism.first_bucket_mib, wire.parallelism.bucket_mib or DEFAULT_BUCKET_MIB
    if first is None or first <= bucket:
        return None
    rule = f"at most parallelism.bucket_mib = {bucket:g}: it is there to send the first gradients early"
    return Problem(f"parallelism.first_bucket_mib={first:g}", rule, f"parallelism.first_bucket_mib={bucket:g}")


def environment_is_plain(wire: schema.Config) -> Problem | None:
    for name, value in wire.launch.env.items():
        what = f"launch.env.{name}={value}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not value.isprintable():
            rule = "a variable has a name of letters, digits and underscores, and one line of text"
            return Problem(what, rule, "launch.env.NAME=VALUE")
        if OWN_VARIABLES.fullmatch(name):
            return Problem(what, "what starts the ranks sets this one itself", f"leave out launch.env.{name}")
        if SECRETS.search(name):
            rule = "launch.env is kept in config.yaml, where no secret belongs; ranks inherit what the shell exports"
            return Problem(f"launch.env.{name}", rule, f"export {name} before the command")
    return None
