"""The verbs: what each is for, which words it takes, and the module that carries it out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """One verb of the command line; `module` has `run(arguments) -> int` and is imported only when the verb is used."""

    name: str
    phase: str
    summary: str
    folders: tuple[str, ...] = ()
    """What it takes besides overrides, as a usage line calls it: no more and no fewer."""
    sections: tuple[str, ...] | None = None
    """Config sections it reads; None = all of them."""
    unread: tuple[str, ...] = ()
    """Keys, or whole sections, among those that it does not read."""
    on_ranks: bool = False
    """Whether it may be started as several processes, or start them; any other refuses, since each would do the whole work."""
    built: bool = True

    @property
    def module(self) -> str:
        return f"llmtrain.cli.{self.name}"

    def reads(self, key: str) -> bool:
        """Whether it reads a key, or an option of a group; a word for what it does not read is refused and not ignored.

        Files are not looked at: one experiment may serve several verbs.
        """
        section = key.partition(".")[0]
        hidden = any(key == name or key.startswith(f"{name}.") for name in self.unread)
        return (self.sections is None or section in self.sections) and not hidden


PHASES = ("before", "run", "prove", "after")
DEFAULT_VERB = "train"
FOR_RANKS = ("launch.timeout_seconds", "launch.env")
"""What only matters to a verb that runs on several ranks."""
NOT_AVAILABLE = "not available in this version"

VERBS = {
    verb.name: verb
    for verb in (
        Verb(
            "doctor",
            "before",
            "versions, devices and every option, with the reason where one is not available",
            sections=("launch", "output"),
            unread=FOR_RANKS,
            on_ranks=True,
        ),
        Verb("plan", "before", "where memory and time will go", built=False),
        Verb(
            "prepare",
            "before",
            "turn text into token files, with several processes",
            sections=("data", "tokenizer", "prepare", "output"),
            unread=("data.sequence_length", "data.packing"),
        ),
        # The sample at the end of a training begins a new text with the other keys of `generate`.
        Verb(
            "train",
            "run",
            "train a model; with the run.name of an earlier run, resume it",
            unread=("evaluate", "convert", "generate.step", "generate.prompt", "prepare.path"),
            on_ranks=True,
        ),
        Verb(
            "evaluate",
            "run",
            "score validation text with a checkpoint: the run's own, or what data=… names",
            ("RUN_FOLDER",),
            ("evaluate", "data", "prepare", "launch", "output"),
            unread=("prepare.path", *FOR_RANKS),
        ),
        Verb(
            "generate",
            "run",
            "continue a prompt with a checkpoint",
            ("RUN_FOLDER",),
            ("generate", "launch", "output"),
            unread=FOR_RANKS,
        ),
        Verb("check", "prove", "same loss and gradients as one process", built=False),
        Verb("bench", "prove", "memory, speed and loss of combinations", built=False),
        Verb(
            "convert",
            "after",
            "a Hugging Face folder to a run folder, or back",
            ("hf:FOLDER|RUN_FOLDER", "RUN_FOLDER|hf:FOLDER"),
            ("convert", "output"),
        ),
        Verb("report", "after", "one page from one or more run folders", built=False),
    )
}
