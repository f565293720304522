"""Promise 8: nothing leaves this host. Python code is watched by an audit hook, native code by `strace`, and without any network all
of it still works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.network_guard import attempts, environment
from helpers.runs import write_text
from helpers.tracker_files import tensorboard_values, wandb_runs, wandb_values

TESTS = Path(__file__).parents[1]
RUNNER = TESTS / "helpers" / "verbs_runner.py"
PLANTED = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)"
NOBODY = "example.invalid"
SMALL = (
    "model.dim=16",
    "model.num_layers=1",
    "model.attention.num_heads=2",
    "data.sequence_length=16",
    "accumulation.global_batch_size=2",
    "train.steps=3",
    "train.eval_every=0",
    "precision=fp32",
    "launch.device=cpu",
    "launch.threads=1",
    "generate.max_tokens=4",
)
TEXT = ("data=text", "data.path=text", "data.cache_dir=cache")
TRACKED = "tracker=[wandb,tensorboard]"
INET = re.compile(r"sa_family=AF_INET6?\b.*?(?:inet_addr\(\"|inet_pton\(AF_INET6, \")([0-9a-f:.]+)\"")


def clean_environment(home: Path) -> dict[str, str]:
    """An account that has never logged in anywhere."""
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "XDG_"))}
    return kept | {"HOME": str(home), "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}


def run(command: Sequence[str], folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240)


def verbs(lines: Any) -> list[str]:
    return [sys.executable, str(RUNNER), json.dumps(lines)]


def training(name: str, *words: str) -> list[str]:
    return ["train", *SMALL, f"run.name={name}", *words]


def write_documents(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": f"document {index} says {index % 7}"}) + "\n" for index in range(200)))


def assert_tracked(folder: Path) -> None:
    assert sorted(tensorboard_values(folder / "tensorboard")) == [1, 2, 3]
    assert sorted(wandb_values(wandb_runs(folder / "wandb")[-1])) == [1, 2, 3]


def test_no_verb_reaches_for_a_network(tmp_path: Path) -> None:
    write_text(tmp_path / "text", 12)
    write_documents(tmp_path / "records.jsonl")
    records = ["data=jsonl", "data.path=records.jsonl", "data.cache_dir=cache", "tokenizer=bpe", "tokenizer.vocab_size=300"]
    lines = [
        ["doctor"],
        ["plan", *SMALL],
        training("synthetic", "data=synthetic", TRACKED),
        training("text", *TEXT, TRACKED),
        ["generate", "runs/text", "generate.max_tokens=4"],
        ["evaluate", "runs/text"],
        ["prepare", *records, "prepare.workers=2", "prepare.shard_bytes=1000"],
        training("records", *records),
        ["convert", "runs/text", "hf:exported"],
        ["convert", "hf:exported", "runs/imported"],
    ]
    variables = environment(tmp_path / "guard", clean_environment(tmp_path / "home"))
    done = run(verbs(lines), tmp_path, variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert attempts(tmp_path / "guard") == []
    assert "off:" not in done.stdout, "no tracker may have failed, as it would when it is refused a network"
    for name in ("synthetic", "text"):
        assert_tracked(tmp_path / "runs" / name)
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize(
    ("code", "event"),
    [
        (PLANTED, "socket.getaddrinfo 192.0.2.1"),
        ("import socket; socket.socket().connect(('192.0.2.1', 80))", "socket.connect (('192.0.2.1', 80),)"),
        (f"import socket; socket.getaddrinfo('{NOBODY}', 443)", f"socket.getaddrinfo {NOBODY}"),
        (f"import socket; socket.gethostbyname('{NOBODY}')", f"socket.gethostbyname {NOBODY}"),
        ("import socket; socket.socket(type=2).sendto(b'x', ('192.0.2.1', 53))", "socket.sendto (('192.0.2.1', 53),)"),
        ("import socket; socket.socket().bind(('0.0.0.0', 0))", "socket.bind (('0.0.0.0', 0),)"),
        ("import socket; socket.socket(10).bind(('::', 0))", "socket.bind (('::', 0),)"),
        (f"import urllib.request as r; r.urlopen('http://{NOBODY}/x')", f"urllib.Request http://{NOBODY}/x"),
        (
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PLANTED!r}], check=True)",
            "socket.getaddrinfo 192.0.2.1",
        ),
        (f"import os; {PLANTED} if os.fork() == 0 else os._exit(bool(os.wait()[1]))", "socket.getaddrinfo 192.0.2.1"),
        (f"try: {PLANTED}\nexcept OSError: raise SystemExit(1)", "socket.getaddrinfo 192.0.2.1"),
    ],
)
def test_the_guard_catches_what_is_planted(tmp_path: Path, code: str, event: str) -> None:
    done = run([sys.executable, "-c", code], tmp_path, environment(tmp_path / "guard"))
    assert done.returncode != 0
    assert [line.partition(" ")[2] for line in attempts(tmp_path / "guard")] == [event]


@pytest.mark.parametrize(
    "code",
    [
        "import socket as s; a = s.socket(); a.bind(('127.0.0.1', 0)); a.listen(); s.create_connection(a.getsockname())",
        "import socket as s; s.getaddrinfo('localhost', 80); s.getaddrinfo(None, 80); s.socketpair()",
        "import socket as s; a = s.socket(s.AF_UNIX); a.bind('here'); a.listen(); s.socket(s.AF_UNIX).connect('here')",
    ],
)
def test_the_guard_lets_this_host_speak_to_itself(tmp_path: Path, code: str) -> None:
    done = run([sys.executable, "-c", code], tmp_path, environment(tmp_path / "guard"))
    assert (done.returncode, done.stderr, attempts(tmp_path / "guard")) == (0, "", [])


def test_a_reach_from_within_a_training_is_seen(tmp_path: Path) -> None:
    """Planted twice: in a process that the training starts, and in the training itself."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "wandb.py").write_text(PLANTED)
    (tmp_path / "planted" / "tensorboard.py").write_text(PLANTED)
    variables = clean_environment(tmp_path / "home")
    variables["PYTHONPATH"] = f"{tmp_path / 'planted'}:{variables['PYTHONPATH']}"
    variables = environment(tmp_path / "guard", variables)
    done = run(verbs([training("planted", "data=synthetic", TRACKED)]), tmp_path, variables)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [line.split(" ", 1) for line in attempts(tmp_path / "guard")]
    assert [event for _, event in seen] == 2 * ["socket.getaddrinfo 192.0.2.1"]
    assert len({process for process, _ in seen}) == 2
    assert done.stdout.count("tracker wandb is off") >= 1 and done.stdout.count("tracker tensorboard is off") >= 1


def has(*command: str) -> bool:
    """Whether a tool is here and allowed to do its work."""
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def test_training_works_where_there_is_no_network_at_all(tmp_path: Path) -> None:
    isolated = ("unshare", "--user", "--map-root-user", "--net")
    if not has(*isolated, "true"):
        pytest.skip("`unshare --user --net` is not allowed here")
    write_text(tmp_path / "text", 12)
    lines = [training("text", *TEXT, "tokenizer=bpe", "tokenizer.vocab_size=300", TRACKED)]
    done = run([*isolated, *verbs(lines)], tmp_path, clean_environment(tmp_path / "home"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "off:" not in done.stdout
    assert_tracked(tmp_path / "runs" / "text")


def outside(trace: str) -> list[str]:
    """Lines of a trace in which an internet socket is given an address that is not loopback."""
    found = []
    for line in trace.splitlines():
        host = INET.search(line)
        if host and not (host[1].startswith("127.") or host[1] == "::1"):
            found.append(line)
    return found


def test_native_code_reaches_for_no_network_either(tmp_path: Path) -> None:
    """wandb's process is a program in Go, tokenizers a library in Rust: what they ask of the system is read, not what they say."""
    trace = tmp_path / "trace"
    traced = ("strace", "-f", "-qq", "-e", "trace=connect,bind,sendto,sendmsg,sendmmsg", "-o", str(trace))
    if not has(*traced, "true"):
        pytest.skip("`strace` is not installed or not allowed here")
    write_text(tmp_path / "text", 12)
    lines = [training("text", *TEXT, "tokenizer=bpe", "tokenizer.vocab_size=300", TRACKED)]
    variables = clean_environment(tmp_path / "home")
    done = run([*traced, *verbs(lines)], tmp_path, variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_tracked(tmp_path / "runs" / "text")
    assert "AF_UNIX" in trace.read_text(), "wandb's process was traced"
    assert outside(trace.read_text()) == []
    code = "import socket as s; a = s.socket(type=s.SOCK_DGRAM); a.connect(('192.0.2.1', 53))"
    run([*traced, sys.executable, "-c", code], tmp_path, variables)
    assert len(outside(trace.read_text())) == 1, "the trace shows what is planted"
