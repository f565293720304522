"""The verb `convert`: which folder is which, what is told, and that a conversion that is cut short leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.faulty_files import FailingFiles, UnsyncedFiles
from helpers.models import LLAMA_LIKE
from helpers.scripts import ROOT
from safetensors.torch import load_file

from llmtrain.checkpoint.hf_config import write_config
from llmtrain.checkpoint.hf_families import LLAMA
from llmtrain.checkpoint.hf_weights import write_weights
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.cli.dispatch import dispatch
from llmtrain.config.errors import ConfigError, StorageError
from llmtrain.config.typed import ConvertConfig
from llmtrain.plan.shapes import parameter_shapes
from llmtrain.train.convert import export_run, import_folder
from llmtrain.train.run_folder import RunFolder

Told = Callable[..., str]


def make_folder(folder: Path, **changes: object) -> Path:
    """A Hugging Face folder without tokenizer."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(LLAMA_LIKE).items()}
    write_weights(folder, weights, LLAMA_LIKE, LLAMA, dtype="fp32", shard_bytes=10**9)
    document = write_config(LLAMA_LIKE, dtype="fp32", bos_id=None, eos_id=3)
    (folder / "config.json").write_text(json.dumps({**document, **changes}))
    return folder


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a Hugging Face folder `hf` and a run `runs/x` made of it."""
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "hf")
    import_folder(Path("hf"), Path("runs/x"), lambda text: None, UnsyncedFiles())
    return tmp_path


@pytest.fixture
def told(there: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    """A refused command's message."""

    def run(*words: str, code: int = 2) -> str:
        capsys.readouterr()
        assert dispatch(["convert", *words]) == code
        return capsys.readouterr().err

    return run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_import_and_export_tell_what_was_written(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["convert", "hf:hf", "runs/mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["to", "runs/mine"] in [line.split() for line in lines]
    assert lines[-1].startswith("next  llmtrain model.init_from=runs/mine run.name=mine-tuned")
    assert dispatch(["convert", "runs/mine", "hf:out/folder", "convert.dtype=bf16", "convert.shard_bytes=9e3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["dtype", "bf16"] in [line.split() for line in lines]
    assert "model.safetensors.index.json" in " ".join(lines) and "out/folder" in lines[-1]
    assert {tensor.dtype for file in Path("out/folder").glob("*.safetensors") for tensor in load_file(file).values()} == {
        torch.bfloat16
    }


def test_one_document_with_output_json(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["convert", "runs/x", "hf:out", "output=json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["to"], document["step"], document["weights"]) == ("out", 0, ["model.safetensors"])


def test_the_run_folder_is_that_of_a_run_at_step_0(there: Path) -> None:
    folder = RunFolder(Path("runs/x"))
    status, imported, wire = folder.read_status(), folder.read_imported(), folder.read_config()
    assert status is not None and imported is not None and wire is not None
    assert (status.code, status.step) == (0, 0)
    assert (imported["source"], imported["model_type"]) == ("hf", "llama")
    assert folder.read_precision() == "fp32"
    assert (wire["model"]["vocab_size"], wire["data"]["sequence_length"]) == (61, 48)
    state = CheckpointStore(folder.checkpoints, keep=1).newest_state()
    assert state is not None and state["tokenizer"]["kind"] == "ids" and state["tokenizer"]["eos_id"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("hf", "runs/new"), "llmtrain convert hf:hf runs/new"),
        (("runs/x", "out"), "llmtrain convert runs/x hf:out"),
        (("hf:hf", "hf:out"), "llmtrain convert hf:hf out"),
        (("hf:", "runs/new"), "hf:FOLDER"),
        (("hf:nobody/Model-1B", "runs/new"), "nothing is downloaded"),
        (("runs/x", "hf:hf"), "nothing is written over"),
        (("hf:hf", "runs/x"), "nothing is written over"),
        (("runs/x", "hf:out", "convert.step=7"), "convert.step=0"),
        (("hf:hf", "runs/new", "convert.dtype=bf16"), "only read when a run folder is exported"),
        (("hf:hf", "runs/new", "train.steps=3"), "convert reads convert and output only"),
        (("hf:hf",), "convert takes hf:FOLDER|RUN_FOLDER RUN_FOLDER|hf:FOLDER"),
    ],
)
def test_mistakes_have_a_cure(words: tuple[str, ...], said: str, told: Told) -> None:
    before = names(Path("."))
    assert said in told(*words)
    assert names(Path(".")) == before and names(Path("runs")) == ["x"]


def test_exit_codes_of_what_is_not_there(told: Told) -> None:
    assert "runs/none is no run folder" in told("runs/none", "hf:out", code=74)
    (Path("hf") / "model.safetensors").unlink()
    assert "no weights in hf" in told("hf:hf", "runs/new", code=74)
    (Path("hf") / "config.json").write_text("{")
    assert "no JSON" in told("hf:hf", "runs/new", code=74)
    assert names(Path("runs")) == ["x"]


def test_a_config_no_run_can_have_is_refused_with_its_keys(told: Told, tmp_path: Path) -> None:
    make_folder(tmp_path / "odd", num_key_value_heads=3, rope_theta=0.5, rope_parameters=None)
    message = told("hf:odd", "runs/new")
    assert "num_key_value_heads=3" in message and "rope_theta=0.5" in message
    assert "odd/config.json: " in message and "model." not in message


def test_an_end_outside_the_vocabulary_is_left_out(there: Path) -> None:
    """The library writes its default, 50256, into the config.json of a small GPT-2."""
    for name, ends, found in (("outside", 50256, None), ("several", [50256, 7, 3], 7)):
        make_folder(there / name, eos_token_id=ends)
        import_folder(Path(name), Path(f"runs/{name}"), lambda text: None, UnsyncedFiles())
        state = CheckpointStore(Path(f"runs/{name}/checkpoints"), keep=1).newest_state()
        assert state is not None and state["tokenizer"]["eos_id"] == found


def test_an_imported_run_is_not_resumed(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run.name=x", "data=synthetic", "tokenizer=ids", "model.vocab_size=61", "data.sequence_length=8"]
    assert dispatch(words) == 2
    assert "try   model.init_from=runs/x run.name=OTHER" in capsys.readouterr().err


def test_pickled_weights_run_no_code(there: Path, told: Told) -> None:
    class Harm:
        def __reduce__(self) -> object:
            return os.mkdir, ("harmed",)

    Path("hf/model.safetensors").unlink()
    Path("hf/pytorch_model.bin").write_bytes(pickle.dumps(Harm()))
    assert "save_pretrained" in told("hf:hf", "runs/new", code=74)
    assert not Path("harmed").exists()


def test_every_call_of_a_conversion_may_fail_and_nothing_is_left(there: Path) -> None:
    convert = ConvertConfig(step=None, dtype="fp32", shard_bytes=9000)

    def export(target: str, files: FailingFiles) -> None:
        export_run(Path("runs/x"), Path(target), convert, lambda text: None, files)

    def bring(target: str, files: FailingFiles) -> None:
        import_folder(Path("hf"), Path(target), lambda text: None, files)

    for action in (export, bring):
        counted = FailingFiles(errno.ENOSPC, fail_at=10**9)
        action(f"counting-{action.__name__}", counted)
        before = names(there)
        # The last sync comes after the rename.
        for number in range(1, counted.count):
            with pytest.raises(StorageError):
                action("new", FailingFiles(errno.ENOSPC, fail_at=number))
            assert names(there) == before, (action.__name__, number)


KILLED = """
import sys
from pathlib import Path
from helpers.faulty_files import SlowFiles
from llmtrain.config.typed import ConvertConfig
from llmtrain.train.convert import export_run
print("begins", flush=True)
export_run(Path("runs/x"), Path("out"), ConvertConfig(None, "fp32", 9000), print, SlowFiles(0.02, 2000))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_export_leaves_no_folder(number: signal.Signals, there: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as job:
        until = time.monotonic() + 60
        while not list(there.glob(".out.staging-*/*.safetensors")):
            assert job.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        job.send_signal(number)
        assert job.wait(30) != 0
    assert not Path("out").exists()
    export_run(Path("runs/x"), Path("out"), ConvertConfig(None, "fp32", 9000), lambda text: None)
    assert names(there) == ["hf", "out", "runs"]


def test_an_export_that_no_class_computes_writes_nothing(there: Path) -> None:
    folder = RunFolder(Path("runs/x"))
    text = (folder.path / "config.yaml").read_text()
    (folder.path / "config.yaml").write_text(text.replace("window: null", "window: 16"))
    with pytest.raises(ConfigError, match="model.attention.window=16"):
        export_run(folder.path, Path("out"), ConvertConfig(None, "fp32", 10**9), lambda text: None)
    assert names(there) == ["hf", "runs"]


def test_weights_of_another_shape_than_the_config_are_refused(there: Path) -> None:
    folder = RunFolder(Path("runs/x"))
    text = (folder.path / "config.yaml").read_text()
    (folder.path / "config.yaml").write_text(text.replace("hidden_dim: 48", "hidden_dim: 64"))
    with pytest.raises(StorageError, match="blocks.0.feed_forward.up.weight is"):
        export_run(folder.path, Path("out"), ConvertConfig(None, "fp32", 10**9), lambda text: None)


def test_a_damaged_newest_checkpoint_is_passed_over_and_told(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = CheckpointStore(Path("runs/x/checkpoints"), keep=2)
    loaded = store.load()
    store.save(5, loaded.tensors, loaded.state)
    (file,) = Path("runs/x/checkpoints/step-00000005").glob("tensors-*")
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert dispatch(["convert", "runs/x", "hf:out"]) == 0
    assert "step-00000005" in capsys.readouterr().out
