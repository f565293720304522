"""Token files that other programs wrote: found, told apart, checked, split and opened as streams.

Validation is `data.validation_path`; or, where the files of `data.path` are named for it (`train.bin` and `val.bin`,
`fineweb_train_000001.bin` and `fineweb_val_000000.bin`), those; or the last `validation_fraction` of the tokens, from the document
border next to it if that makes it at most twice or half as long.

Ids are compared with the vocabulary when files are opened: all of them up to ALL_IDS_BYTES, evenly spaced stretches beyond. Each
batch is compared again when it is read, so no wrong id ever reaches the model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.defaults import DEFAULT_VALIDATION_FRACTION
from llmtrain.config.errors import ConfigError, DataError, Problem
from llmtrain.config.paths import user_path
from llmtrain.config.typed_data import TokenData, TokenFormat
from llmtrain.data.packing import TokenStream
from llmtrain.data.paths import find_files
from llmtrain.data.record_units import stamp
from llmtrain.data.token_array import BLOCK_TOKENS, Origin, TokenArray
from llmtrain.data.token_borders import Borders, IndexedBorders, MarkedBorders, OneDocument, Progress
from llmtrain.data.token_layouts import TokenFile, open_token_file, tell_format
from llmtrain.data.token_width import check_width

SUFFIXES = (".bin", ".ds")
DEFAULT_DTYPE = "uint16"
"""Of raw ids where `data.dtype` does not say another."""
ALL_IDS_BYTES = 1 << 30
"""Up to this size every id is compared with the vocabulary when files are opened: a second."""
FINGERPRINT_BLOCKS = 1024
FINGERPRINT_TOKENS = 4096
_SIDE = re.compile(r"(?<![a-z])(train|val|test)(?:ing|id|idation)?(?![a-z])")


@dataclass(frozen=True)
class TokenFiles:
    """Token files, opened, checked and split."""

    train: TokenStream
    validation: TokenStream
    format: TokenFormat
    """Never `auto`."""
    fingerprints: tuple[str, str]
    """Of what training and validation read; the same wherever the files lie and whatever they are called."""
    name: str
    """For the run card, e.g. `fineweb10B (llm_c, 104 files)`."""
    held_out: str
    """How validation was chosen, in words."""


@dataclass(frozen=True)
class _Tokens:
    """Files after each other, as one stream."""

    array: TokenArray
    borders: Borders
    identity: tuple[str, ...]
    """What decides the document borders, for the fingerprint."""


def open_token_files(
    source: TokenData, *, vocab_size: int, eos_id: int | None, progress: Progress = lambda line: None
) -> TokenFiles:
    """Open the files that a config names.

    Args:
        vocab_size: ids at or above it are refused.
        eos_id: token that ends each document, and in `llm_c` begins it (None = that of GPT-2; Llama 3 has its own and this is not
            read). Where there is an index it is not needed. None elsewhere = documents are not told apart.
        progress: gets a line whenever there is news.

    Raises:
        ConfigError: a path names a home folder that is not there, or a setting that these files have no use for.
        DataError: no files, files that are not what their format says, ids that the vocabulary does not have, nothing to split.
    """
    assert source.format is not TokenFormat.PREPARED
    paths, name = _find(source.path, f"data.path={source.path}", source)
    layout = _format(source, paths)
    train, held_out, how = list(paths.values()), [], ""
    if source.validation_path is not None:
        held_out = list(_find(source.validation_path, f"data.validation_path={source.validation_path}", source)[0].values())
        how = "data.validation_path"
    elif (sides := _split_by_name(paths)) is not None:
        (train, held_out), how = sides, "by file names"
    _check_settings(source, layout, how)
    _check_apart(train, held_out, source)
    dtype = source.dtype or DEFAULT_DTYPE
    files = {path: open_token_file(path, layout, dtype) for path in [*train, *held_out]}
    _check_alike(list(files.values()), layout, vocab_size)

    def stream(paths: Iterable[Path]) -> _Tokens:
        return _join([files[path] for path in paths], layout, vocab_size, eos_id, progress)

    if held_out:
        parts = [(tokens, 0, len(tokens.array)) for tokens in (stream(train), stream(held_out))]
    else:
        tokens = stream(train)
        cut, how = _cut(tokens, source)
        parts = [(tokens, 0, cut), (tokens, cut, len(tokens.array))]
    for tokens in dict.fromkeys(tokens for tokens, _, _ in parts):
        _check_ids(tokens.array, progress)
    splits = [_split(*part) for part in parts]
    kind = f"raw {dtype}" if layout is TokenFormat.RAW else layout.value
    count = f"{len(files)} files" if len(files) > 1 else "1 file"
    return TokenFiles(
        train=splits[0][0],
        validation=splits[1][0],
        format=layout,
        fingerprints=(splits[0][1], splits[1][1]),
        name=f"{name} ({kind}, {count})",
        held_out=how,
    )


def _find(path: str, setting: str, source: TokenData) -> tuple[dict[str, Path], str]:
    """Files by name, and what to call them. The common name of Megatron's two files stands for both, and either does."""
    given = user_path(path, setting)
    pair = Path(f"{given}.bin")
    if not given.exists() and pair.is_file():
        path = str(pair)
    elif given.suffix == ".idx" and given.is_file():
        path = str(given.with_suffix(".bin"))
    found = find_files(path, setting, SUFFIXES)
    return {found.name(file): file for file in found.paths}, given.name or str(given)


def _format(source: TokenData, paths: dict[str, Path]) -> TokenFormat:
    if source.format is not TokenFormat.AUTO:
        return source.format
    told = {tell_format(path): path for path in paths.values()}
    if len(told) > 1:
        (first, one), (second, other), *_ = told.items()
        rule = f"{one.name} looks like {first.value} and {other.name} like {second.value}"
        raise DataError(Problem(f"data.path={source.path}", rule, "a pattern for those of one format, or data.format=FORMAT"))
    return next(iter(told))


def _check_settings(source: TokenData, layout: TokenFormat, how: str) -> None:
    """Raise ConfigError for settings that would change nothing."""
    if source.dtype is not None and layout is not TokenFormat.RAW:
        rule = f"files of {layout.value}, which these are, say themselves how ids are stored"
        raise ConfigError(Problem(f"data.dtype={source.dtype}", rule, "leave it out, or data.format=raw"))
    if source.validation_fraction is not None and how:
        rule = f"validation is chosen already: {how}"
        cure = "leave it out, or data.path=PATTERN for training files alone"
        raise ConfigError(Problem(f"data.validation_fraction={source.validation_fraction:g}", rule, cure))


def _split_by_name(paths: dict[str, Path]) -> tuple[list[Path], list[Path]] | None:
    """Training and validation files where names tell them apart; files named for tests are left out."""
    sides: dict[str, list[Path]] = {"train": [], "val": [], "test": [], "": []}
    for name, path in paths.items():
        words = _SIDE.findall(name.lower())
        sides[words[-1] if words else ""].append(path)
    if not sides["train"] or not sides["val"]:
        return None
    if sides[""]:
        rule = f"{sides['train'][0].name} and {sides['val'][0].name} are named for a split, and {sides[''][0].name} is not"
        raise DataError(Problem(str(sides[""][0]), rule, "data.path=PATTERN and data.validation_path=PATTERN"))
    return sides["train"], sides["val"]


def _check_apart(train: Sequence[Path], held_out: Sequence[Path], source: TokenData) -> None:
    """What is scored is not trained on, unless it is the same on purpose: scoring files whole names them twice."""
    both = {path.resolve() for path in train} & {path.resolve() for path in held_out}
    if both and source.path != source.validation_path:
        rule = f"{min(both)} would be trained on and held out"
        what = f"data.path={source.path} data.validation_path={source.validation_path}"
        raise DataError(Problem(what, rule, "data.path=PATTERN that leaves it out"))


def _check_alike(files: Sequence[TokenFile], layout: TokenFormat, vocab_size: int) -> None:
    """All files come from one tokenizer, as far as they say."""
    for file in files:
        first = files[0]
        if file.made_with != first.made_with:
            rule = f"it was made with tokenizer {file.made_with}, and {first.path.name} with {first.made_with}"
            raise DataError(Problem(str(file.path), rule, "data.path=PATTERN for the files of one tokenizer"))
        if layout is TokenFormat.LLM_C and file.begin_token != first.begin_token:
            rule = f"it has {file.tokens.dtype.name} ids, and {first.path.name} has {first.tokens.dtype.name} ids of another tokenizer"
            raise DataError(Problem(str(file.path), rule, "data.path=PATTERN for the files of one tokenizer"))
        if layout is TokenFormat.RAW:
            check_width(file.path, file.tokens, vocab_size)


def _join(files: Sequence[TokenFile], layout: TokenFormat, vocab_size: int, eos_id: int | None, progress: Progress) -> _Tokens:
    origins = [Origin(file.path, file.first_byte) for file in files]
    array = TokenArray([file.tokens for file in files], vocab_size=vocab_size, origins=origins)
    if all(file.read_borders is not None for file in files):
        indexes = [file.index for file in files if file.index is not None]
        identity = ("index", *(stamp(path, path.name).sample_sha256 for path in indexes))
        return _Tokens(array, IndexedBorders(lambda: _all_borders(files)), identity)
    # Files with the header of GPT-2 may have ids of any tokenizer; those with that of Llama 3 begin documents with its begin-of-text.
    knows_best = layout is TokenFormat.LLM_C and (eos_id is None or files[0].tokens.dtype.itemsize == 4)
    mark = files[0].begin_token if knows_best else eos_id
    if mark is None:
        return _Tokens(array, OneDocument(), ("one document",))
    begins = layout is TokenFormat.LLM_C
    return _Tokens(array, MarkedBorders(array, mark, begins, progress), ("mark", str(mark), str(begins)))


def _all_borders(files: Sequence[TokenFile]) -> NDArray[np.int64]:
    """Documents of indexed files; none goes on in the next file."""
    borders, before = [np.zeros(1, np.int64)], 0
    for file in files:
        assert file.read_borders is not None
        borders.append(file.read_borders()[1:] + before)
        before += len(file.tokens)
    return np.concatenate(borders)


def _cut(tokens: _Tokens, source: TokenData) -> tuple[int, str]:
    """Where validation begins, and how that was chosen."""
    count = len(tokens.array)
    if count < 2:
        rule = f"{count} tokens cannot be split into training and validation"
        raise DataError(Problem(f"data.path={source.path}", rule, "data.validation_path=PATH, or more tokens"))
    wanted = min(max(1, round(count * (source.validation_fraction or DEFAULT_VALIDATION_FRACTION))), count - 1)
    border = tokens.borders.nearest(count - wanted)
    if border is None or not wanted / 2 <= count - border <= 2 * wanted:
        return count - wanted, "the tail held out"
    return border, "the last documents held out"


def _check_ids(array: TokenArray, progress: Progress) -> None:
    stride = BLOCK_TOKENS
    if array.num_bytes > ALL_IDS_BYTES:
        stride = BLOCK_TOKENS * array.num_bytes // ALL_IDS_BYTES
    for start in range(0, len(array), stride):
        progress(f"checking token ids: {start / len(array):.0%}")
        array.check(start, min(start + BLOCK_TOKENS, len(array)))


def _split(tokens: _Tokens, start: int, stop: int) -> tuple[TokenStream, str]:
    """A split and its fingerprint."""
    array = tokens.array.slice(start, stop)
    digest = hashlib.sha256(repr((len(array), start, tokens.identity)).encode())
    # Evenly spaced stretches, the first and the last included; a small split is read whole.
    last = max(0, len(array) - FINGERPRINT_TOKENS)
    for low in np.unique(np.linspace(0, last, FINGERPRINT_BLOCKS).astype(np.int64)).tolist():
        digest.update(array.read_range(low, min(low + FINGERPRINT_TOKENS, len(array))).astype("<i8").tobytes())
    return TokenStream(array, lambda: tokens.borders.offsets(start, stop)), digest.hexdigest()
