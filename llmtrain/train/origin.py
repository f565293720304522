"""What a run keeps of the Hugging Face folder that its weights came from: what an export gives back, and what ends a text.

An imported run folder has it in itself; a run that began with the weights of such a folder has a copy in `origin/`, so that it needs
no other folder once it has begun.
"""

from __future__ import annotations

from llmtrain.checkpoint.files import remove_tree, storage_error, write_atomic
from llmtrain.data.tokenizer import Tokenizer
from llmtrain.train.foreign_tokenizer import FOLDER
from llmtrain.train.run_folder import RunFolder

ORIGIN = "origin"


def origin_of(folder: RunFolder) -> RunFolder | None:
    """Where imported.json and the tokenizer files of a run are; None for a run that began with nothing imported."""
    places = (folder, RunFolder(folder.path / ORIGIN, folder.files))
    return next((place for place in places if place.read_imported() is not None), None)


def forget_origin(folder: RunFolder) -> None:
    """Remove what a start that never saved anything has copied.

    Raises:
        StorageError: it cannot be removed.
    """
    path = folder.path / ORIGIN
    try:
        if path.exists():
            remove_tree(folder.files, path)
    except OSError as error:
        raise storage_error(folder.files, error, "remove", path) from error


def copy_origin(source: RunFolder, folder: RunFolder) -> None:
    """Copy into a run folder what `source`, whose weights it begins with, knows of its own origin.

    Raises:
        StorageError: it cannot be read or written.
    """
    origin = origin_of(source)
    document = None if origin is None else origin.read_imported()
    if origin is None or document is None:
        return
    target = RunFolder(folder.path / ORIGIN, folder.files)
    try:
        for path in (target.path, target.path / FOLDER):
            folder.files.make_folder(path)
        folder.files.fsync_folder(folder.path)
        kept = {name: origin.files.read(origin.path / FOLDER / name) for name in document["tokenizer_files"]}
    except OSError as error:
        raise storage_error(folder.files, error, "copy the tokenizer of", origin.path) from error
    for name, data in kept.items():
        write_atomic(folder.files, target.path / FOLDER / name, data)
    # The last file is the one that says there is an origin.
    target.write_imported({key: value for key, value in document.items() if key != "format_version"})


def end_ids(folder: RunFolder, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a text: the tokenizer's, and those that the imported folder names, as long as the tokenizer is its own.

    A chat model ends a turn with another token than a text; its generation_config.json lists both.
    """
    own = frozenset() if tokenizer.eos_id is None else frozenset({tokenizer.eos_id})
    origin = origin_of(folder)
    document = None if origin is None else origin.read_imported()
    if document is None or document["tokenizer_fingerprint"] != tokenizer.fingerprint:
        return own
    told = (document["generation_config"] or {}).get("eos_token_id", document["config"].get("eos_token_id"))
    named = told if isinstance(told, list) else [told]
    return own | {token for token in named if isinstance(token, int) and not isinstance(token, bool)}
