"""Which files become documents, how they are held out, and that reading in blocks loses nothing."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain.config.errors import ConfigError, DataError
from llmtrain.config.typed_data import BpeTokenizerConfig, StdlibData, TextData
from llmtrain.data import text_cuts
from llmtrain.data.paths import check_unchanged
from llmtrain.data.sources import Document, Scan, SourceFile, describe_skipped, read_blocks, scan_source
from llmtrain.data.text_cuts import last_cut
from llmtrain.data.tokenizer import train_tokenizer

MakeFolder = Callable[[Sequence[str]], Path]


def scan(path: Path, fraction: float = 0.2) -> Scan:
    return scan_source(TextData(str(path), None, fraction, None))


def text_of(document: Document) -> str:
    return "".join(read_blocks(document))


def document_with(tmp_path: Path, content: bytes) -> Document:
    path = tmp_path / "document"
    path.write_bytes(content)
    return Document(SourceFile(path, len(content), 0, ""), 0, len(content))


def test_many_documents_are_held_out_whole_by_content(make_folder: MakeFolder) -> None:
    texts = [f"document {i}\n" for i in range(60)]
    found = scan(make_folder(texts))
    train, validation = [text_of(d) for d in found.train], [text_of(d) for d in found.validation]
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in train]
    assert 4 <= len(validation) <= 22
    assert found.held_out == "whole files held out"


def test_a_document_keeps_its_side_when_others_go_and_a_copy_goes_with_it(make_folder: MakeFolder) -> None:
    folder = make_folder([f"document {i}\n" for i in range(60)])
    before = scan(folder)
    held_out = {text_of(d) for d in before.validation}
    for path in sorted(folder.iterdir())[::4]:
        path.unlink()
    (folder / "copy.txt").write_text(sorted(held_out)[0])
    after = scan(folder)
    assert {text_of(d) for d in after.validation} <= held_out
    assert not {text_of(d) for d in after.train} & held_out


def test_each_side_gets_a_document_whatever_the_fraction(make_folder: MakeFolder) -> None:
    folder = make_folder([f"document {i}\n" for i in range(20)])
    assert len(scan(folder, 1e-9).validation) == 1
    assert len(scan(folder, 1 - 1e-9).train) == 1


def test_few_documents_are_cut_at_a_line_break(make_folder: MakeFolder) -> None:
    texts = ["".join(f"line {i} of file {k}\n" for i in range(100)) for k in range(3)]
    found = scan(make_folder(texts), 0.1)
    for text, head, tail in zip(texts, found.train, found.validation):
        assert text_of(head) + text_of(tail) == text
        assert text_of(head).endswith("\n")
        assert 0.05 < len(text_of(tail)) / len(text) < 0.15
    assert found.held_out == "the tail of each file held out"


@given(text=st.text(alphabet="ab é日\n", min_size=2, max_size=60), fraction=st.floats(0.01, 0.99))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_cut_file_loses_nothing_and_no_character_is_halved(tmp_path: Path, text: str, fraction: float) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(text.encode())
    found = scan(path, fraction)
    assert text_of(found.train[0]) + text_of(found.validation[0]) == text
    assert text_of(found.train[0]) and text_of(found.validation[0])


def test_a_line_break_far_away_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("title\n" + "x" * 100_000)
    (validation,) = scan(path, 0.1).validation
    assert len(text_of(validation)) == pytest.approx(10_000, abs=2)


def test_b33_strange_files_are_left_out_and_counted(make_folder: MakeFolder) -> None:
    """Empty, not UTF-8, hidden, a broken link, a pipe: the others are kept in order, and what is missing is counted."""
    folder = make_folder([f"good {i}\n" for i in range(4)])
    (folder / "0001b.txt").write_bytes(b"")
    (folder / "0002b.txt").write_bytes(b"good start \xff\xfe bad end")
    (folder / "0002c.txt").write_bytes("cut in a character é".encode()[:-1])
    (folder / ".hidden").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    os.symlink(folder / "nowhere", folder / "link.txt")
    os.mkfifo(folder / "pipe")
    found = scan(folder)
    assert [d.file.path.name for d in found.train] == ["0000.txt", "0001.txt", "0002.txt", "0003.txt"]
    assert dict(found.skipped) == {"empty": 1, "not UTF-8": 2, "hidden": 2, "not a regular file": 2}
    assert describe_skipped(found.skipped) == "7 files skipped (1 empty, 2 hidden, 2 not UTF-8, 2 not a regular file)"


def test_folders_are_read_in_one_order(tmp_path: Path) -> None:
    for name in ("b/2.md", "a.txt", "b/10.txt", "a/x.rst", "c"):
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n" * 3)
    found = scan(tmp_path / "texts")
    names = [d.file.path.relative_to(tmp_path / "texts").as_posix() for d in found.train]
    assert names == ["a.txt", "a/x.rst", "b/10.txt", "b/2.md", "c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "it is empty"), (b"abc\xff", "not UTF-8 .near byte 3"), ("é".encode()[:1], "not UTF-8")],
)
def test_b33_a_bad_single_file_is_an_error_that_names_it(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        scan(path)
    assert str(path) in str(caught.value)


def test_nothing_to_read_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not there"):
        scan(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no text in .*empty"):
        scan(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a regular file nor a folder"):
        scan(tmp_path / "pipe")


def test_an_unreadable_file_is_an_error_that_names_it(make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(["one\n", "two\n"])
    open_file = Path.open

    def refuse(self: Path, *args: object, **kwargs: object) -> object:
        if self.name == "0001.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return open_file(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="0001.txt") as caught:
        scan(folder)
    assert "Permission denied" in str(caught.value)


def test_a_file_that_becomes_unreadable_after_the_scan_is_an_error_that_names_it(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(["one\n" * 9, "two\n" * 9])
    open_file, opened = Path.open, []

    def refuse_again(self: Path, *args: object, **kwargs: object) -> object:
        if self in opened:
            raise OSError(5, "Input/output error", str(self))
        opened.append(self)
        return open_file(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse_again)
    with pytest.raises(DataError, match="0000.txt") as caught:
        scan(folder)
    assert "Input/output error" in str(caught.value)


def test_a_home_folder_is_found_or_the_error_says_which_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.txt").write_text("line\n" * 9)
    assert scan(Path("~/text.txt")).name == "text.txt"
    with pytest.raises(ConfigError, match="`~nosuchuser` stands for a home folder") as caught:
        scan(Path("~nosuchuser/text.txt"))
    assert "error: data.path=~nosuchuser/text.txt" in str(caught.value) and "  try   " in str(caught.value)


def test_equal_documents_cannot_be_split(make_folder: MakeFolder) -> None:
    with pytest.raises(DataError, match="nothing is left for training") as caught:
        scan(make_folder(["the same\n"] * 20))
    assert "data.validation_fraction" in str(caught.value)


@given(text=st.text(alphabet="aB é日\n\t\u00a0", max_size=200), block=st.integers(8, 40))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_join_to_the_document(tmp_path: Path, text: str, block: int) -> None:
    parts = list(read_blocks(document_with(tmp_path, text.encode()), block))
    assert "".join(parts) == text
    for part in parts:
        assert 0 < len(part.encode()) <= block or not last_cut(part.encode()[:block])


@given(words=st.lists(st.text(alphabet="abé,'s1\u00a0", max_size=5), max_size=60), data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_do_not_change_bpe_ids(tmp_path: Path, words: list[str], data: st.DataObject) -> None:
    """With a letter and white space in reach of every block end, the ids of the pieces are those of the whole."""
    space = st.sampled_from([" ", "\n", "  ", "\n\n ", "\t"])
    text = "".join(f"x{word}y{data.draw(space)}" for word in words)
    tokenizer = train_tokenizer(BpeTokenizerConfig(290), lambda: ["xay xby, 's\n\n  xéy" * 4, "y  x y\n x"])
    parts = read_blocks(document_with(tmp_path, text.encode()), 32)
    pieces = [i for part in parts for i in tokenizer.encode(part).tolist()]
    assert pieces == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("content", [b"w" * 300_000, b" " * 300_000, "日".encode() * 100_000, b"a " + b"w" * 300_000])
def test_b33_giant_documents_take_work_in_proportion_to_their_length(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words far longer than a block: bounded pieces, few of them, and every byte is handed out once."""
    longest = 1 << 14
    monkeypatch.setattr(text_cuts, "LONGEST_WORD_BYTES", longest)
    parts = [part.encode() for part in read_blocks(document_with(tmp_path, content), 1 << 12)]
    assert b"".join(parts) == content
    assert max(map(len, parts)) <= longest
    assert len(parts) <= len(content) / longest + 3


def test_a_file_that_changes_while_it_is_read_is_noticed(make_folder: MakeFolder) -> None:
    folder = make_folder(["one line\n" * 10, "two\n" * 10])
    found = scan(folder)
    check_unchanged(found.files)
    (folder / "0001.txt").write_text("two\n")
    with pytest.raises(DataError, match="0001.txt"):
        check_unchanged(found.files)
    with pytest.raises(DataError, match="changed while it was being read"):
        list(read_blocks(found.validation[1]))


def test_standard_library_is_found_without_its_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "a.py",
        "pydoc_data/topics.py",
        "test/x.py",
        "json/tests/y.py",
        "site-packages/z.py",
        "__pycache__/a.py",
        "b.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"'''{name}'''\n" * 5)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    found = scan_source(StdlibData(0.1, None))
    assert [d.file.path.relative_to(tmp_path).as_posix() for d in found.train] == ["a.py", "pydoc_data/topics.py"]
    assert found.name == "Python's own library" and not found.skipped


def test_standard_library_of_this_interpreter_is_megabytes() -> None:
    found = scan_source(StdlibData(0.05, None))
    names = [d.file.path.name for d in (*found.train, *found.validation)]
    assert "argparse.py" in names and len(names) > 300
    assert sum(d.stop for d in found.train) > 5_000_000 and sum(d.stop for d in found.validation) > 100_000
    assert found.held_out == "whole modules held out"
    assert not {d.file.sha256 for d in found.train} & {d.file.sha256 for d in found.validation}
