"""Folders of the transformers library: imported, they compute the same here; exported, they compute the same there."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import twins
from helpers.hf_folders import LENGTH, MODELS, TEXT, save_folder, transformers
from helpers.models import gradients, random_tokens, relative_error
from helpers.runs import run, run_words, saved, write_text
from torch import Tensor

from llmtrain.cli.dispatch import dispatch
from llmtrain.config.typed import GenerateConfig, LaunchConfig, ReferenceLoss
from llmtrain.data.tokenizer import IdTokenizer
from llmtrain.model.generate import generate
from llmtrain.ops.cross_entropy import build_loss
from llmtrain.train.initial import initial_weights
from llmtrain.train.saved_run import SavedRun, load_run

LAUNCH = LaunchConfig(nproc=None, device="cpu", threads=1)


@dataclass(frozen=True)
class Imported:
    """A model of transformers, the folder it was saved in, and the run folder made of that."""

    twin: Any
    source: Path
    folder: Path

    def load(self) -> SavedRun:
        return load_run(self.folder, LAUNCH)


def imported(parent: Path, name: str, **keys: Any) -> Imported:
    twin = save_folder(parent / "source", name, **keys)
    assert dispatch(["convert", f"hf:{parent / 'source'}", str(parent / "run")]) == 0
    return Imported(twin, parent / "source", parent / "run")


def exported(run: Path, target: Path, *words: str) -> Path:
    assert dispatch(["convert", str(run), f"hf:{target}", *words]) == 0
    return target


def begin_with(folder: Path, runs: Path, name: str, *more: str) -> str:
    """Train on other text from the weights in `folder`; what was printed."""
    words = [word for word in run_words(write_text(runs / "text"), runs, name) if not word.startswith("model.")]
    code, printed = run(f"model.init_from={folder}", *words, "train.steps=3", *more)
    assert code == 0
    return printed


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    return imported(tmp_path_factory.mktemp("import"), request.param)


def loaded_twin(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def tokens(vocab_size: int, *, seed: int = 0) -> Tensor:
    return random_tokens(1, LENGTH, seed=seed, vocab_size=vocab_size)


def test_b60_logits_and_gradients_at_all_positions(case: Imported) -> None:
    ours = case.load().model
    vocab_size = ours.config.vocab_size
    read, targets = tokens(vocab_size), tokens(vocab_size, seed=1)
    expected = case.twin(read).logits
    assert expected.std() > 0.3 and expected.shape == (1, LENGTH, vocab_size)
    hidden = ours(read)
    torch.testing.assert_close(ours.logits(hidden), expected, rtol=0, atol=1e-4)

    build_loss(ReferenceLoss(), ours.precision)(hidden.flatten(0, 1), ours.head_weight, targets.flatten()).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    under_our_names = twins.gpt2_tensors if case.twin.config.model_type == "gpt2" else twins.llama_tensors
    theirs = under_our_names({name: parameter.grad for name, parameter in case.twin.named_parameters()}, ours.config)
    if not ours.config.tie_embeddings and case.twin.config.model_type == "gpt2":
        theirs["head.weight"] = case.twin.lm_head.weight.grad
    for name, gradient in gradients(ours).items():
        if not name.endswith("k.bias"):  # its true gradient is zero
            assert relative_error(gradient, theirs[name]) < 1e-4, name
    case.twin.zero_grad(set_to_none=True)


def test_b60_an_export_computes_the_same_and_comes_back_bit_for_bit(case: Imported, tmp_path: Path) -> None:
    out = exported(case.folder, tmp_path / "out")
    back = loaded_twin(out)
    assert type(back) is type(case.twin)
    read = tokens(back.config.vocab_size)
    assert torch.equal(back(read).logits, case.twin(read).logits)
    for name, parameter in case.twin.state_dict().items():
        assert torch.equal(back.state_dict()[name], parameter), name
    assert dispatch(["convert", f"hf:{out}", str(tmp_path / "again")]) == 0
    first, second = initial_weights(case.folder), initial_weights(tmp_path / "again")
    assert first.step == second.step == 0 and list(first.tensors) == list(second.tensors)
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


def test_b60_an_export_says_what_the_folder_said(case: Imported, tmp_path: Path) -> None:
    out = exported(case.folder, tmp_path / "out")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((out / name).read_text()) == json.loads((case.source / name).read_text()), name
    ours, theirs = (transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (out, case.source))
    changed = {key for key in theirs if ours.get(key) != theirs[key]}
    # The first windowed layer says nothing where there is no window.
    assert changed <= {"transformers_version", "_name_or_path", "n_inner", "rope_parameters", "max_window_layers"}
    # Numbers that were left to be worked out are written out.
    rope, before = (config.get("rope_parameters") or {} for config in (ours, theirs))
    assert before.items() <= rope.items()
    assert set(rope) - set(before) <= {"attention_factor", "beta_fast", "beta_slow"}


def test_b60_old_and_new_readers_find_theta_and_scaling(case: Imported, tmp_path: Path) -> None:
    out = exported(case.folder, tmp_path / "out")
    document = json.loads((out / "config.json").read_text())
    read = tokens(document["vocab_size"])
    expected = case.twin(read).logits
    for hidden in (("rope_parameters", "dtype"), ("rope_theta", "rope_scaling", "torch_dtype")):
        (out / "config.json").write_text(json.dumps({k: v for k, v in document.items() if k not in hidden}))
        assert torch.equal(loaded_twin(out)(read).logits, expected)


def test_tokenizer_there_and_back(case: Imported, tmp_path: Path) -> None:
    out = exported(case.folder, tmp_path / "out")
    theirs, back = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (case.source, out))
    run = case.load()
    assert (run.tokenizer.bos_id, run.tokenizer.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert run.config.data.bos is True  # as that tokenizer does by itself
    for text in (TEXT, "", " x", "\n\n", "Ünïcödé ½", "don't"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert run.tokenizer.encode(text).tolist() == ids == back(text, add_special_tokens=False)["input_ids"]
        assert run.tokenizer.decode(ids) == theirs.decode(ids)
        assert back(text)["input_ids"] == theirs(text)["input_ids"] == [1, *ids]


GREEDY = GenerateConfig(None, "", max_tokens=50, temperature=0.0, top_k=None, top_p=None, seed=0)


@pytest.mark.parametrize("name", ["llama", "llama, yarn", "qwen3 with windows", "gpt2 untied"])
def test_b60_greedy_text_is_the_same_and_stops_at_the_same_end(name: str, tmp_path: Path) -> None:
    prompt = [7, 33, 121, 5]
    case = imported(tmp_path / "free", name, with_tokenizer=False, eos_token_id=None, bos_token_id=None)
    free = case.twin.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False, pad_token_id=0)[0].tolist()[4:]
    assert len(free) == 50
    run = case.load()
    assert list(generate(run.model, prompt, GREEDY, eos_ids=run.eos_ids)) == free
    end = next(token for token in free[8:] if free.index(token) >= 8)
    case = imported(tmp_path / "ends", name, with_tokenizer=False, eos_token_id=end, bos_token_id=None)
    run = case.load()
    out = exported(case.folder, tmp_path / "out")
    theirs = loaded_twin(out).generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False)[0].tolist()[4:]
    ours = list(generate(run.model, prompt, GREEDY, eos_ids=run.eos_ids))
    assert theirs == [*ours, end] == free[: free.index(end) + 1]


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_b60_text_ends_at_any_of_the_listed_ends(place: str, tmp_path: Path) -> None:
    """As in chat models, whose turn ends with another token than a text; also after a training that began with them."""
    prompt = [7, 33, 121, 5]
    free = save_folder(tmp_path / "free", "llama").generate(
        torch.tensor([prompt]), max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    end = next(token for token in free[0].tolist()[12:] if token > 2)
    case = imported(tmp_path, "llama", eos_token_id=[2, end])
    if place == "config.json":
        (case.source / "generation_config.json").unlink()
        assert dispatch(["convert", f"hf:{case.source}", str(tmp_path / "again")]) == 0
        case = Imported(case.twin, case.source, tmp_path / "again")
    theirs = loaded_twin(case.source).generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False)[0].tolist()[4:]
    run = case.load()
    assert run.eos_ids == {2, end}
    assert theirs == [*generate(run.model, prompt, GREEDY, eos_ids=run.eos_ids), end]
    begin_with(case.folder, tmp_path, "tuned")
    begin_with(tmp_path / "tuned", tmp_path, "further")
    assert load_run(tmp_path / "further", LAUNCH).eos_ids == {2, end}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_other_dtypes_and_shards_load(dtype: str, tmp_path: Path) -> None:
    case = imported(tmp_path, "gpt2")
    out = exported(case.folder, tmp_path / "out", f"convert.dtype={dtype}", "convert.shard_bytes=60000")
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    back = loaded_twin(out)
    assert {parameter.dtype for parameter in back.parameters()} == {kind}
    for name, parameter in case.twin.state_dict().items():
        assert torch.equal(back.state_dict()[name], parameter.to(kind)), name


def test_weights_in_bf16_become_fp32_masters_and_go_back_unchanged(tmp_path: Path) -> None:
    twin = save_folder(tmp_path / "fp32", "llama").to(torch.bfloat16)
    twin.save_pretrained(tmp_path / "source", max_shard_size="30KB")
    assert (tmp_path / "source" / "model.safetensors.index.json").is_file()
    assert dispatch(["convert", f"hf:{tmp_path / 'source'}", str(tmp_path / "run")]) == 0
    assert {tensor.dtype for tensor in initial_weights(tmp_path / "run").tensors.values()} == {torch.float32}
    back = loaded_twin(exported(tmp_path / "run", tmp_path / "out", "convert.dtype=bf16"))
    assert all(torch.equal(back.state_dict()[name], parameter) for name, parameter in twin.state_dict().items())


def test_an_imported_folder_has_no_step_to_go_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = imported(tmp_path, "smollm2")
    text = write_text(tmp_path / "text")
    words = run_words(text, tmp_path, "run")
    capsys.readouterr()
    assert dispatch([f"model.init_from={case.folder}", *(word for word in words if not word.startswith("model."))]) == 2
    assert f"model.init_from={case.folder} run.name=OTHER" in capsys.readouterr().err


def test_a_run_begun_with_imported_weights_goes_back_with_its_tokenizer(tmp_path: Path) -> None:
    save_folder(tmp_path / "source", "gpt2", attn_pdrop=0.1)
    (tmp_path / "source" / "chat_template.jinja").write_text("kept")
    case = imported(tmp_path, "gpt2", attn_pdrop=0.1)
    begin_with(case.folder, tmp_path, "tuned")
    case.folder.rename(tmp_path / "moved")
    out = exported(tmp_path / "tuned", tmp_path / "out")
    back, tuned = loaded_twin(out), load_run(tmp_path / "tuned", LAUNCH)
    read = tokens(back.config.vocab_size)
    torch.testing.assert_close(back(read).logits, tuned.model.logits(tuned.model(read)), rtol=0, atol=1e-4)
    assert not torch.equal(back(read).logits, case.twin(read).logits)
    assert (out / "tokenizer.json").read_bytes() == (case.source / "tokenizer.json").read_bytes()
    assert (out / "chat_template.jinja").read_text() == "kept"
    assert (out / "generation_config.json").read_bytes() == (case.source / "generation_config.json").read_bytes()
    assert back.config.attn_pdrop == 0.1


@pytest.mark.parametrize("adds", [True, False])
def test_b60_texts_begin_in_an_export_as_in_the_run(adds: bool, tmp_path: Path) -> None:
    save_folder(tmp_path / "source", "llama")
    if not adds:
        description = json.loads((tmp_path / "source" / "tokenizer.json").read_text())
        (tmp_path / "source" / "tokenizer.json").write_text(json.dumps(description | {"post_processor": None}))
    assert dispatch(["convert", f"hf:{tmp_path / 'source'}", str(tmp_path / "run")]) == 0
    begin_with(tmp_path / "run", tmp_path, "same")
    begin_with(tmp_path / "run", tmp_path, "other", f"data.bos={str(not adds).lower()}")
    for name, first in (("same", adds), ("other", not adds)):
        assert load_run(tmp_path / name, LAUNCH).config.data.bos is first
        tokenizer = transformers.AutoTokenizer.from_pretrained(exported(tmp_path / name, tmp_path / f"out-{name}"))
        plain = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        assert tokenizer(TEXT)["input_ids"] == [1, *plain][not first :], name


def test_what_was_copied_by_a_start_that_saved_nothing_is_not_given_back(tmp_path: Path) -> None:
    case = imported(tmp_path, "llama", eos_token_id=[2, 9])
    begin_with(case.folder, tmp_path, "a")
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    (tmp_path / "a" / "status.json").unlink()
    begin_with(case.folder, tmp_path, "a")
    assert load_run(tmp_path / "a", LAUNCH).eos_ids == {2, 9}
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    (tmp_path / "a" / "status.json").unlink()
    code, _ = run(*run_words(tmp_path / "text", tmp_path, "a", "train.steps=3"))
    assert code == 0 and load_run(tmp_path / "a", LAUNCH).eos_ids == {257}


@pytest.mark.parametrize("shape", ["model=tiny", "model=tiny_gpt2"])
def test_a_run_trained_here_loads_there(shape: str, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    code, _ = run(shape, *run_words(text, tmp_path, "mine", "train.steps=3", "model.vocab_size=264"))
    assert code == 0
    out = exported(tmp_path / "mine", tmp_path / "out")
    back, mine = loaded_twin(out), load_run(tmp_path / "mine", LAUNCH)
    assert back.config.vocab_size == 264  # B17: rows of a padded vocabulary are declared
    length = mine.model.config.max_positions
    read = random_tokens(2, length, vocab_size=264)
    torch.testing.assert_close(back(read).logits, mine.model.logits(mine.model(read)), rtol=0, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == list(TEXT.encode())
    assert (back.config.bos_token_id, back.config.eos_token_id) == (256, 257)
    assert (back.generation_config.bos_token_id, back.generation_config.eos_token_id) == (256, 257)
    assert dispatch(["convert", f"hf:{out}", str(tmp_path / "again")]) == 0
    again, before = initial_weights(tmp_path / "again").tensors, saved(tmp_path / "mine").tensors
    assert all(torch.equal(tensor, before[f"model/{name}"]) for name, tensor in again.items())


def test_a_folder_without_tokenizer_has_plain_ids(tmp_path: Path) -> None:
    case = imported(tmp_path, "llama", with_tokenizer=False)
    run = case.load()
    assert isinstance(run.tokenizer, IdTokenizer) and run.tokenizer.eos_id == 2
    out = exported(case.folder, tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]


def test_b17_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_folder(tmp_path / "source", "llama", vocab_size=299)
    assert dispatch(["convert", f"hf:{tmp_path / 'source'}", str(tmp_path / "run")]) == 65
    assert "at most the 299 rows of the model's embedding" in capsys.readouterr().err
