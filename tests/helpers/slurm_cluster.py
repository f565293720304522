"""A real Slurm of two nodes on this machine: daemons of our own in a temporary folder, without munge, cgroups or a database."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

COMMAND_SECONDS = 30.0
"""Longest time that a command of Slurm may take."""
BOOT_SECONDS = 60.0
NODES = ("n0", "n1")

_CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=5
ReturnToService=2
MinJobAge=3600
KillWait={kill_wait}
SlurmdParameters=config_overrides
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MailProg=/bin/true
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# cred_expire: 5 s is the least; a requeued job waits so long. config_overrides: nodes may claim more CPUs than the machine has.


def missing_reason() -> str:
    """Why no Slurm can be started here; empty when one can."""
    absent = [name for name in ("slurmctld", "slurmd", "srun", "sbatch", "scontrol") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found (Debian: apt-get install --no-install-recommends slurm-wlm)"
    return "" if os.geteuid() == 0 else "slurmd has to be started by root"


@dataclass
class SlurmCluster:
    """The running daemons; every command is given their configuration."""

    folder: Path
    kill_wait: int = 15
    """Seconds between SIGTERM and SIGKILL to a job that is cancelled or out of time."""
    _daemons: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False)

    def start(self) -> None:
        """Start the three daemons and wait until both nodes take jobs.

        Raises:
            TimeoutError: they do not, within `BOOT_SECONDS`.
        """
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        text = _CONFIG.format(host=host, folder=self.folder, ports=_free_ports(3), kill_wait=self.kill_wait)
        self._config_file.write_text(text)
        self._daemon("slurmctld", "-c", "-D")
        for node in NODES:
            self._daemon("slurmd", "-N", node, "-D")
        self.wait_for(lambda: self._states() == ["idle", "idle"], BOOT_SECONDS, "two idle nodes")

    def stop(self) -> None:
        """End every job, then the daemons, whatever state they are in."""
        if self._daemons and self._daemons[0].poll() is None:
            subprocess.run(["scancel", "--user=root"], env=self.environment(), timeout=COMMAND_SECONDS, check=False)
            self._wait_for_steps()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables for a command of Slurm: this process's without those of a job around it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        return kept | {"SLURM_CONF": str(self._config_file), "OMP_NUM_THREADS": "1"} | dict(more or {})

    def call(self, *command: str, seconds: float = COMMAND_SECONDS, more: Mapping[str, str] | None = None) -> str:
        """Standard output of a command.

        Raises:
            AssertionError: it failed or took too long; what it said is in the text.
        """
        ended = self.run(*command, seconds=seconds, more=more)
        assert ended.returncode == 0, f"{' '.join(command)}: exit {ended.returncode}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def run(
        self, *command: str, seconds: float = COMMAND_SECONDS, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command with a hard limit; its exit code is the caller's to judge."""
        process = subprocess.Popen(
            command,
            env=self.environment(more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, errors = process.communicate()
            raise AssertionError(f"{' '.join(command)}: not done after {seconds:g} s\n{out}{errors}") from None
        return subprocess.CompletedProcess(command, process.returncode, out, errors)

    def submit(self, *words: str, more: Mapping[str, str] | None = None) -> str:
        """`sbatch` with these words; the number of the job."""
        return self.call("sbatch", "--parsable", *words, more=more).strip().partition(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """The fields that `scontrol show job` tells, as `JobState`, `Restarts`, `ExitCode`."""
        text = self.call("scontrol", "show", "job", "-o", number).splitlines()[0]
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_for_end(self, number: str, seconds: float) -> dict[str, str]:
        """The job's fields once it has ended for good (a requeued one goes on pending)."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        self.wait_for(lambda: self.job(number)["JobState"] in ended, seconds, f"job {number} ended")
        return self.job(number)

    def wait_for(self, condition: object, seconds: float, what: str) -> None:
        """Look until `condition()` holds.

        Raises:
            TimeoutError: it does not within the time; the queue and the ends of the daemons' logs are in the text.
        """
        assert callable(condition)
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"not after {seconds:g} s: {what}\n{self.describe()}")
            time.sleep(0.2)

    def describe(self) -> str:
        """Queue, nodes and the ends of the logs: for a test that waited in vain."""
        told = [self.run("squeue").stdout, self.run("sinfo", "-N", "-l").stdout]
        for log in sorted(self.folder.glob("*.log")):
            told += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(told)

    @property
    def _config_file(self) -> Path:
        return self.folder / "slurm.conf"

    def _daemon(self, *command: str) -> None:
        with ExitStack() as stack:
            output = stack.enter_context((self.folder / f"{command[0]}-output.log").open("ab"))
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.folder
                )
            )

    def _states(self) -> list[str]:
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()

    def _wait_for_steps(self) -> None:
        """Until no job is left: what a slurmd has started outlives it."""
        end = time.monotonic() + self.kill_wait + 30.0
        while time.monotonic() < end:
            if not self.run("squeue", "--noheader").stdout.strip():
                return
            time.sleep(0.2)


def _free_ports(count: int) -> Sequence[int]:
    """Port numbers of this machine that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
