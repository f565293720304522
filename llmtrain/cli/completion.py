"""Tab completion: the script for each shell, and the candidates it asks for with `llmtrain --complete LINE`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from llmtrain.cli.arguments import OPTIONS, SHORT, VALUES, Arguments
from llmtrain.cli.request import RUN_FILE
from llmtrain.cli.verbs import DEFAULT_VERB, VERBS, Verb
from llmtrain.config import keys
from llmtrain.config.compose import group_options
from llmtrain.config.keys import KeyInfo, ValueKind, leaves
from llmtrain.config.schema import GROUPS

SCRIPTS = {
    # bash breaks words at `=` and then replaces only what follows it, so that part alone is offered.
    "bash": """\
_llmtrain() {
    local line=${COMP_LINE:0:COMP_POINT} IFS=$'\\n'
    local word=${line##*[[:space:]]}
    COMPREPLY=($(llmtrain --complete "$line" 2>/dev/null))
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}")
    fi
    [[ ${COMPREPLY[0]-} == *[=./] ]] && compopt -o nospace
}
complete -F _llmtrain llmtrain
""",
    "zsh": """\
#compdef llmtrain
_llmtrain() {
    local -a candidates
    candidates=(${(f)"$(llmtrain --complete "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)"})
    compadd -Q -S '' -- ${(M)candidates:#*[=./]}
    compadd -Q -- ${candidates:#*[=./]}
}
compdef _llmtrain llmtrain
""",
    "fish": """\
complete -c llmtrain -f -a '(llmtrain --complete (commandline -cp | string collect) 2>/dev/null)'
""",
}


def run(arguments: Arguments) -> int:
    """Print the script of a shell, or the candidates for a line."""
    if arguments.completion:
        print(SCRIPTS[arguments.completion], end="")
    else:
        print("\n".join(candidates(arguments.complete or "")))
    return 0


def candidates(line: str) -> list[str]:
    """What the last word of a line, cut at the cursor, can become; the line starts with the program's name."""
    *before, word = line.split(" ")[1:] or [""]
    typed = [other for other in before if other]
    found = _after_option(typed[-1]) if typed else None
    if found is None:
        found = _words(typed, word)
    return [candidate for candidate in dict.fromkeys(found) if candidate.startswith(word)]


def _after_option(option: str) -> Iterable[str] | None:
    """Values of an option whose value is being typed; None when no value is due."""
    name = SHORT.get(option, option)
    if name == "--help":
        return [*VERBS, *GROUPS, *sorted(keys.sections())]
    return VALUES.get(name)


def _words(typed: Sequence[str], word: str) -> list[str]:
    if word.startswith("-"):
        return list(OPTIONS)
    key, equals, value = word.partition("=")
    if equals:
        # A sweep lists several values: the last one is being typed.
        done = value[: value.rfind(",") + 1]
        return [f"{key}={done}{choice}" for choice in _values(key.lstrip("+"), typed)]
    if word.startswith("+"):
        return [f"+{group}=" for group in GROUPS]
    named = next((other for other in typed if other in VERBS), None)
    verb = VERBS[named or DEFAULT_VERB]
    found = [] if named else [entry.name for entry in VERBS.values() if entry.built]
    found += [f"{group}=" for group in GROUPS if verb.reads(group)]
    found += _keys(word, verb)
    return found + (_run_folders(word) if verb.folders else [])


def _keys(word: str, verb: Verb) -> Iterable[str]:
    """Sections with a dot, and the keys of the section already typed: one level at a time."""
    depth = word.count(".") + 1
    for name in filter(verb.reads, leaves()):
        parts = name.split(".")
        yield ".".join(parts[:depth]) + ("=" if len(parts) <= depth else ".")


def _values(key: str, typed: Sequence[str]) -> Iterable[str]:
    """Options of a group or legal words of a key."""
    if key in GROUPS:
        return group_options(_config_dirs(typed)).get(key, {})
    info = leaves().get(key)
    return [] if info is None else _legal_words(info)


def _legal_words(info: KeyInfo) -> list[str]:
    words = list(info.choices)
    words += ["true", "false"] if info.kind is ValueKind.SWITCH else []
    words += ["auto"] if info.auto else []
    return words + (["null"] if info.optional else [])


def _config_dirs(typed: Sequence[str]) -> list[Path]:
    """Folders given with --config-dir so far, so that their options are offered too."""
    joined = [Path(word.partition("=")[2]) for word in typed if word.startswith("--config-dir=")]
    return joined + [Path(value) for option, value in zip(typed, typed[1:], strict=False) if option == "--config-dir"]


def _run_folders(word: str) -> list[str]:
    """Folders that start with the word: run folders to take, others to go into; without a word, those of `runs`."""
    parent = Path(word).parent if word else Path("runs")
    if word.endswith("/"):
        parent = Path(word)
    if not parent.is_dir():
        return []
    folders = sorted(folder for folder in parent.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    return [str(folder) if (folder / RUN_FILE).is_file() else f"{folder}/" for folder in folders]
