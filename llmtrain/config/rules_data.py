"""Rules between the keys of data and tokenizer."""

from __future__ import annotations

from llmtrain.config import schema
from llmtrain.config.declare import AUTO
from llmtrain.config.defaults import BYTE_VOCAB_SIZE, DEFAULT_BPE_VOCAB_SIZE
from llmtrain.config.errors import Problem
from llmtrain.config.schema_data import FILES, TOKENIZER_FILES


def files_need_a_path(wire: schema.Config) -> Problem | None:
    kind = wire.data.kind
    if kind not in FILES or wire.data.path is not None:
        return None
    return Problem(f"data={kind}", "needs the file or folder to read", "data.path=FILE_OR_FOLDER")


def one_way_to_hold_out(wire: schema.Config) -> Problem | None:
    path, fraction = wire.data.validation_path, wire.data.validation_fraction
    if path is None or fraction is None:
        return None
    rule = "both say what is held out for validation"
    return Problem(f"data.validation_path={path} data.validation_fraction={fraction:g}", rule, "leave one of them out")


def validation_is_other_text(wire: schema.Config) -> Problem | None:
    path = wire.data.validation_path
    if path is None or path != wire.data.path:
        return None
    return Problem(f"data.validation_path={path}", "what is trained on is no validation", "leave out data.validation_path")


def dtype_is_for_raw_files(wire: schema.Config) -> Problem | None:
    dtype, layout = wire.data.dtype, wire.data.format
    if dtype is None or layout in (None, AUTO, "raw"):
        return None
    return Problem(f"data.dtype={dtype}", f"files of data.format={layout} say it themselves", "leave out data.dtype")


def tokens_have_their_marks(wire: schema.Config) -> Problem | None:
    given = [f"data.bos={str(wire.data.bos).lower()}"] if wire.data.bos != AUTO else []
    given += [] if wire.data.eos else ["data.eos=false"]
    if not given or wire.data.kind not in ("synthetic", "tokens"):
        return None
    rules = {
        "synthetic": "data=synthetic draws every token at random and puts no marks around documents",
        "tokens": "the tokens of data=tokens are read as they are, marks included",
    }
    return Problem(given[0], rules[wire.data.kind], f"leave out {given[0].partition('=')[0]}")


def tokenizer_files_need_a_path(wire: schema.Config) -> Problem | None:
    kind = wire.tokenizer.kind
    if kind not in TOKENIZER_FILES or wire.tokenizer.path is not None:
        return None
    what = {"file": "tokenizer.json", "tiktoken": "file of ranks", "sentencepiece": "model file"}[kind]
    return Problem(f"tokenizer={kind}", f"needs the {what} to read", "tokenizer.path=FILE")


def learnt_tokenizers_need_text(wire: schema.Config) -> Problem | None:
    kind = wire.tokenizer.kind
    if wire.data.kind != "tokens" or kind not in ("char", "bpe"):
        return None
    rule = "learnt from text; data=tokens has only the ids of some tokenizer, and it has to be that one"
    return Problem(f"tokenizer={kind}", rule, "tokenizer=ids, or tokenizer=file with tokenizer.path=tokenizer.json")


def plain_ids_come_from_token_files(wire: schema.Config) -> Problem | None:
    if wire.tokenizer.kind != "ids" or wire.data.kind in ("tokens", "synthetic"):
        return None
    return Problem("tokenizer=ids", f"does not read text, and data={wire.data.kind} is text", "tokenizer=byte or data=tokens")


def plain_ids_need_a_vocabulary(wire: schema.Config) -> Problem | None:
    if wire.tokenizer.kind != "ids" or not isinstance(wire.model.vocab_size, str):
        return None
    return Problem("tokenizer=ids", "does not know how many ids there are", "model.vocab_size=50257 for those of GPT-2")


def end_of_text_is_in_the_vocabulary(wire: schema.Config) -> Problem | None:
    token, rows = wire.tokenizer.eos_id, wire.model.vocab_size
    if token is None or isinstance(rows, str) or token < rows:
        return None
    return Problem(f"tokenizer.eos_id={token}", f"below model.vocab_size = {rows}", f"tokenizer.eos_id={rows - 1}")


def vocabulary_holds_the_tokenizer(wire: schema.Config) -> Problem | None:
    rows, tokenizer = wire.model.vocab_size, wire.tokenizer
    brought = wire.data.kind == "tokens" or wire.model.init_from is not None
    kind = "byte" if tokenizer.kind == AUTO and not brought else tokenizer.kind
    needed = {"byte": BYTE_VOCAB_SIZE, "bpe": tokenizer.vocab_size or DEFAULT_BPE_VOCAB_SIZE}.get(kind)
    if isinstance(rows, str) or needed is None or rows >= needed:
        return None
    cure = f"model.vocab_size={needed} or auto"
    cure += f", or tokenizer.vocab_size={rows}" if kind == "bpe" and rows >= BYTE_VOCAB_SIZE + 2 else ""
    return Problem(f"model.vocab_size={rows}", f"at least the {needed} tokens of tokenizer={kind}", cure)


def synthetic_data_has_no_text(wire: schema.Config) -> Problem | None:
    kind = wire.tokenizer.kind
    if wire.data.kind != "synthetic" or kind in (AUTO, "byte", "ids"):
        return None
    return Problem(
        f"tokenizer={kind}", "turns text into tokens, and data=synthetic has no text", "tokenizer=byte or data=stdlib"
    )
