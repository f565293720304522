"""Plugins of installed packages: part of the schema like any option, and one clear message where one cannot be."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from helpers.example_plugin import PAGE, forget_plugins, install, install_page, on_the_path, write_project
from helpers.scripts import ROOT

from llmtrain.cli.completion import candidates
from llmtrain.cli.doctor import option_table
from llmtrain.cli.help import overview, topic_page
from llmtrain.config import plugins, schema
from llmtrain.config.compose import compose_config, config_from_wire, group_options, to_yaml
from llmtrain.config.errors import ConfigError
from llmtrain.config.keys import leaves, sections
from llmtrain.config.sweep import expand_sweep
from llmtrain.config.typed import AdamWConfig, PluginLoss, PluginOptimizer
from llmtrain.config.typed_data import PluginData
from llmtrain.train.build import with_absolute_paths
from llmtrain.train.run_changes import Effect, find_changes

TEMPERED = ("attention=tempered", "attention.tempered.temperature=2")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_page(tmp_path_factory.mktemp("site"))


@pytest.fixture
def extras(site: Path) -> Iterator[None]:
    """The package of docs/plugins.md is installed."""
    with on_the_path(site):
        yield


def test_without_plugins_the_schema_is_the_written_one() -> None:
    assert plugins.discover() == plugins.Discovery((), ())
    assert plugins.schema_class() is schema.Config
    composed = compose_config([])
    assert composed.config.plugins == {} and composed.wire == dataclasses.asdict(schema.Config())


@pytest.mark.usefixtures("extras")
class TestInstalled:
    def test_its_keys_are_keys(self) -> None:
        info = leaves()["attention.tempered.temperature"]
        assert (info.default, info.gt, info.doc) == (1.0, 0, "divides the scores")
        assert "tempered" in leaves()["attention.backend"].choices and "tempered" not in leaves()["loss.kind"].choices
        assert {"attention.tempered", "optimizer.signum", "loss.smoothed", "tracker.losses"} <= sections()

    @pytest.mark.parametrize(
        "words", [TEMPERED, ("attention.backend=tempered", TEMPERED[1]), ("+attention=[tempered]", TEMPERED[1])]
    )
    def test_chosen_by_option_or_key(self, words: tuple[str, ...]) -> None:
        composed = compose_config(words)
        assert composed.config.attention_backend == "tempered"
        (options,) = composed.config.plugins.values()
        assert type(options).__name__ == "Tempered" and options.temperature == 2.0
        assert composed.wire["attention"]["tempered"] == {"temperature": 2.0}
        assert "signum" not in composed.wire["optimizer"] and "losses" not in composed.wire["tracker"]

    def test_each_group_freezes_its_choice(self) -> None:
        config = compose_config(
            ["optimizer=signum", "optimizer.signum.momentum=0.5", "optimizer.weight_decay=0", "loss=smoothed", "tracker=losses"]
        ).config
        optimizer, loss = config.optimizer, config.loss
        source = compose_config(["data=sums", "data.sums.largest=7", "data.validation_fraction=0.5"]).config.data.source
        assert isinstance(source, PluginData) and (source.options.largest, source.validation_fraction) == (7, 0.5)
        assert isinstance(optimizer, PluginOptimizer) and optimizer.options.momentum == 0.5 and optimizer.weight_decay == 0
        assert isinstance(loss, PluginLoss) and loss.options.smoothing == 0.1
        assert set(config.plugins) == {"optimizer.signum", "loss.smoothed", "tracker.losses"}
        assert config.plugins["tracker.losses"].file == "losses.csv"
        assert isinstance(compose_config([]).config.optimizer, AdamWConfig)

    def test_a_saved_config_means_the_same(self) -> None:
        composed = compose_config([*TEMPERED, "optimizer=signum", "tracker=[losses,tensorboard]"])
        assert composed.config.tracker.tensorboard
        assert config_from_wire(yaml.safe_load(to_yaml(composed.wire))) == composed.config

    @pytest.mark.parametrize(
        "words,fragments",
        [
            (
                ["attention.tempered.temprature=2"],
                ["attention.tempered.temprature=2", "no such", "attention.tempered.temperature"],
            ),
            ([TEMPERED[0], "attention.tempered.temperature=-1"], ["attention.tempered.temperature=-1", "a number > 0"]),
            ([TEMPERED[1]], ["only attention.backend=tempered reads it; attention.backend is auto", "word 1"]),
            (["attention=tempred"], ["the options of attention are", "attention=tempered"]),
            (["attention.backend=tempred"], ["attention.backend=tempred", "attention.backend=tempered"]),
            (["attention=tempered", "attention=sdpa"], ["one option at a time, not tempered and sdpa"]),
            (["attention=[sdpa,tempered]"], ["one option at a time, not sdpa and tempered"]),
            (["attention.tempered=2"], ["a section with keys of its own: temperature"]),
            (["tracker.losses.file=x.csv"], ["only tracker.losses.enabled=true reads it", "tracker.losses.enabled is false"]),
            (["data=sums", "data.path=book.txt"], ["only data=text, jsonl, parquet or tokens reads it; data.kind is sums"]),
            (["optimizer=signum", "optimizer.beta1=0.5"], ["only optimizer=adamw reads it; optimizer.kind is signum"]),
            (["attention=tempered", "attention.kernel=flash"], ["attention.kernel=flash", "attention=sdpa"]),
            (["attention=tempered", "model.dropout.attention=0.1"], ["only attention=reference drops attention weights"]),
        ],
        ids=lambda case: " ".join(case) if isinstance(case, list) else None,
    )
    def test_mistakes_are_refused(self, words: list[str], fragments: list[str], refusal: Callable[..., str]) -> None:
        report = refusal(*words)
        assert report.count("error:") == 1
        for fragment in fragments:
            assert fragment in report

    def test_what_a_stronger_source_replaces_is_no_mistake(self, tmp_path: Path) -> None:
        """A word beats a file that configures a plugin, and a plugin beats a file that configures AdamW."""
        (tmp_path / "experiment").mkdir()
        (tmp_path / "attention").mkdir()
        head = "# @package _global_\n# saves nothing; costs nothing; changes training: yes\n"
        (tmp_path / "experiment" / "cool.yaml").write_text(
            f"{head}attention:\n  backend: tempered\n  tempered:\n    temperature: 3\noptimizer:\n  beta1: 0.5\n"
        )
        (tmp_path / "attention" / "hot.yaml").write_text("backend: tempered\ntempered:\n  temperature: 0.5\n")
        cool = compose_config(["+experiment=cool"], config_dirs=[tmp_path]).config
        assert cool.attention_backend == "tempered" and cool.plugins["attention.tempered"].temperature == 3
        plain = compose_config(["+experiment=cool", "attention=reference"], config_dirs=[tmp_path]).config
        assert plain.attention_backend == "reference" and plain.plugins == {}
        mixed = compose_config(["+experiment=cool", "optimizer=signum"], config_dirs=[tmp_path]).config
        assert isinstance(mixed.optimizer, PluginOptimizer)
        hot = compose_config(["attention=hot"], config_dirs=[tmp_path]).config
        assert hot.plugins["attention.tempered"].temperature == 0.5
        for words in (["attention=tempered", "attention.backend=sdpa"], ["attention.backend=sdpa", "attention=tempered"]):
            assert compose_config(words).config.attention_backend == "sdpa", "a key is stronger than an option, as with files"

    def test_an_experiment_may_be_followed_by_the_word(self, tmp_path: Path) -> None:
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /attention: [sdpa]\n")
        config = compose_config(["+experiment=mine", "attention=tempered"], config_dirs=[tmp_path]).config
        assert config.attention_backend == "tempered"

    def test_pages_show_it(self) -> None:
        assert group_options()["attention"]["tempered"].startswith("saves nothing; costs memory")
        assert any("tempered" in line for line in overview([], 100))
        page = "\n".join(topic_page("attention", [], 100))
        assert "divides the scores; a number > 0; default 1.0; only with attention.backend=tempered" in page
        assert "attention=tempered" in candidates("llmtrain attention=t")
        assert candidates("llmtrain attention.backend=te") == ["attention.backend=tempered"]
        assert candidates("llmtrain attention.tempered.") == ["attention.tempered.temperature="]
        listed = {group: list(options) for group, options in group_options().items()}
        table = option_table(listed, {})
        assert table["attention"]["tempered"].available and table["tracker"]["losses"].available

    def test_it_can_be_swept(self) -> None:
        jobs = expand_sweep(["attention=tempered,reference", "attention.tempered.temperature=1"])
        assert [compose_config(job.words).config.attention_backend for job in jobs] == ["tempered", "reference"]

    def test_a_resumed_run_may_not_quietly_change_it(self) -> None:
        plain, with_it, warmer = (compose_config(words).wire for words in ([], TEMPERED, [TEMPERED[0]]))
        sums = compose_config(["data=sums"]).wire
        assert {change.effect for change in find_changes(plain, sums)} == {Effect.SHAPE}
        for old, new in ((plain, with_it), (with_it, plain), (with_it, warmer)):
            changes = find_changes(old, new)
            assert changes and {change.effect for change in changes} == {Effect.TRAINING}
        assert find_changes(with_it, with_it) == ()
        assert {change.effect for change in find_changes(plain, compose_config(["attention=sdpa"]).wire)} == {Effect.PASSES}
        assert {change.effect for change in find_changes(plain, compose_config(["tracker=losses"]).wire)} == {Effect.PASSES}


def test_a_run_made_before_the_package_was_installed_is_unchanged(site: Path) -> None:
    before = compose_config([]).wire
    with on_the_path(site):
        after = compose_config([]).wire
        assert after == before and find_changes(before, after) == ()


def test_a_saved_config_without_the_package_names_what_is_missing(site: Path) -> None:
    with on_the_path(site):
        wire = compose_config([*TEMPERED, "tracker=losses"]).wire
    with pytest.raises(ConfigError) as caught:
        config_from_wire(wire)
    report = str(caught.value)
    assert report.count("error:") == 2
    assert "attention.backend=tempered" in report and "no package here registers tempered for attention" in report
    assert "tracker.losses.enabled=true" in report and "no package here registers losses for tracker" in report


BROKEN = {
    "import": (
        "import no_such_module_anywhere",
        "cannot be imported: ModuleNotFoundError: No module named 'no_such_module_anywhere'",
    ),
    "syntax": ("plugin = (", "cannot be imported: SyntaxError"),
    "missing": ("other = 1", "cannot be imported: AttributeError"),
    "kind": ("plugin = {'group': 'attention'}", "is a dict and not a llmtrain.plugins.Plugin"),
    "group": ("plugin = make(group='model')", "plugins are for attention, optimizer, data, loss, tracker, not for 'model'"),
    "name": ("plugin = make(name='My Plugin')", "its name is lower-case letters, digits and underscores, not 'My Plugin'"),
    "taken": ("plugin = make(name='sdpa')", "attention has a sdpa already"),
    "a key": ("plugin = make(name='kernel')", "attention has a kernel already"),
    "later": ("plugin = make(group='loss', name='liger')", "loss has a liger already"),
    "summary": ("plugin = make(summary='fast')", "its summary has the form"),
    "device": ("plugin = make(devices=('tpu',))", "its devices are some of cpu, cuda"),
    "no device": ("plugin = make(group='data', devices=('cpu',))", "devices are asked for of attention, optimizer and loss"),
    "no dataclass": ("class Options: x = key(1, 'x')\nplugin = make(options=Options)", "its options are a dataclass"),
    "undeclared": (
        "@dataclass\nclass Options:\n    x: int = 1\nplugin = make(options=Options)",
        "its options (x) are declared by",
    ),
    "type": (
        "@dataclass\nclass Options:\n    x: bytes = key(b'', 'x')\nplugin = make(options=Options)",
        "its options (x) are declared",
    ),
    "kinds": (
        "@dataclass\nclass Options:\n    x: int = key(1, 'x', kinds=('a',))\nplugin = make(options=Options)",
        "x: kinds, later and built are for the keys of llmtrain itself",
    ),
    "path": (
        "@dataclass\nclass Options:\n    x: int = key(1, 'x', path=True)\nplugin = make(options=Options)",
        "x: path is for text, not for a whole number",
    ),
    "enabled": (
        "@dataclass\nclass Options:\n    enabled: bool = key(True, 'x')\nplugin = make(group='tracker', options=Options)",
        "`enabled` is added by llmtrain",
    ),
}
HEAD = """from dataclasses import dataclass
from llmtrain.plugins import Plugin, key
def make(**changes):
    own = dict(group="attention", name="mine", summary="saves a; costs b; changes training: no", build=print)
    return Plugin(**(own | changes))
"""


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_one_clear_message(case: str, tmp_path: Path, refusal: Callable[..., str]) -> None:
    code, rule = BROKEN[case]
    module = f"broken_{case.replace(' ', '_')}"
    install(tmp_path, "broken-package", "2.1", {"mine": f"{module}:plugin"}, {f"{module}.py": f"{HEAD}{code}\n"})
    with on_the_path(tmp_path):
        report = refusal()
        assert report.count("error:") == 1
        for fragment in (rule, "plugin mine of broken-package 2.1", f"entry point mine = {module}:plugin in llmtrain.plugins"):
            assert fragment in report
        assert "attention" in "\n".join(overview([], 100))
        assert plugins.schema_class() is schema.Config


def test_two_plugins_of_one_name_are_both_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    for number in (1, 2):
        module = {f"twin_{number}.py": f"{HEAD}plugin = make()\n"}
        install(tmp_path, f"package-{number}", "1.0", {"mine": f"twin_{number}:plugin"}, module)
    with on_the_path(tmp_path):
        report = refusal()
        assert report.count("package-1 1.0 and package-2 1.0 both register mine for attention") == 2
        assert "twin_1:plugin" in report and "twin_2:plugin" in report
        assert "mine" not in leaves()["attention.backend"].choices


def test_options_may_be_of_every_kind(tmp_path: Path) -> None:
    code = """
@dataclass
class Inner:
    depth: int = key(3, "an inner key", ge=1)
@dataclass
class Options:
    number: float | None = key(None, "a number or nothing")
    words: list[str] = key([], "words", choices=("a", "b"))
    names: dict[str, str] = key({}, "names")
    switch: bool = key(False, "a switch")
    mode: str = key("x", "a word", choices=("x", "y"))
    inner: Inner = field(default_factory=Inner)
from dataclasses import field
plugin = make(options=Options)
"""
    code = f"from __future__ import annotations\nfrom dataclasses import field\n{HEAD}{code}"
    install(tmp_path, "every-kind", "1", {"mine": "every_kind:plugin"}, {"every_kind.py": code})
    with on_the_path(tmp_path):
        prefix = "attention.mine"
        words = ["number=2", "words=[a,b]", "names.k=v", "switch=true", "mode=y", "inner.depth=5"]
        config = compose_config(["attention=mine", *(f"{prefix}.{word}" for word in words)]).config
        options = config.plugins[prefix]
        assert (options.number, options.words, options.names, options.switch) == (2.0, ["a", "b"], {"k": "v"}, True)
        assert (options.mode, options.inner.depth) == ("y", 5)
        with pytest.raises(ConfigError, match="a whole number >= 1"):
            compose_config(["attention=mine", f"{prefix}.inner.depth=0"])


def test_a_path_of_a_plugin_is_kept_whole(tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
@dataclass
class Inner:
    table: str | None = key(None, "another file to read", path=True)
@dataclass
class Options:
    file: str = key("", "a file to read", path=True)
    word: str = key("x", "no file")
    inner: Inner = field(default_factory=Inner)
plugin = make(options=Options)
"""
    code = f"from __future__ import annotations\nfrom dataclasses import field\n{HEAD}{code}"
    install(tmp_path, "with-files", "1", {"mine": "with_files:plugin"}, {"with_files.py": code})
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with on_the_path(tmp_path):
        words = [
            "attention.mine.file=a.txt",
            "attention.mine.word=b",
            "attention.mine.inner.table=~/t",
            "data.path=c",
            "data=text",
        ]
        wire = compose_config(["attention=mine", *words]).wire
        kept = with_absolute_paths(wire)
        own = {"file": str(tmp_path / "a.txt"), "word": "b", "inner": {"table": str(tmp_path / "home" / "t")}}
        assert kept["attention"]["mine"] == own and kept["data"]["path"] == str(tmp_path / "c")
        assert wire["attention"]["mine"]["file"] == "a.txt", "what was typed stays as it was"
        assert with_absolute_paths(compose_config(["attention=mine"]).wire)["attention"]["mine"]["file"] == ""
        assert with_absolute_paths(compose_config([]).wire) == compose_config([]).wire
        assert "attention.mine.file=' '" in refusal("attention=mine", "attention.mine.file=' '")


def test_a_plugin_may_have_no_options(tmp_path: Path) -> None:
    install(tmp_path, "bare", "1", {"mine": "bare_one:plugin"}, {"bare_one.py": f"{HEAD}plugin = make()\n"})
    with on_the_path(tmp_path):
        composed = compose_config(["attention=mine"])
        assert composed.config.plugins == {"attention.mine": plugins.NoOptions()}
        assert "mine" not in composed.wire["attention"]
        assert config_from_wire(composed.wire) == composed.config


def run_python(*words: str, site: Path | None, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line of a fresh process with a folder of packages on its path."""
    path = os.pathsep.join(str(folder) for folder in (site, ROOT) if folder is not None)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "llmtrain", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_version_and_help_work_beside_a_broken_plugin(tmp_path: Path) -> None:
    install(tmp_path, "broken", "1", {"mine": "broken_here:plugin"}, {"broken_here.py": "raise RuntimeError('no luck')\n"})
    assert run_python("--version", site=tmp_path, cwd=tmp_path).returncode == 0
    shown = run_python("--help", site=tmp_path, cwd=tmp_path)
    assert shown.returncode == 0 and shown.stderr == ""
    refused = run_python("train.steps=1", site=tmp_path, cwd=tmp_path)
    assert refused.returncode == 2 and "RuntimeError: no luck" in refused.stderr and "broken 1" in refused.stderr


def test_a_plugin_brings_no_torch_to_a_page(site: Path, tmp_path: Path) -> None:
    code = "import sys\nfrom llmtrain.cli.dispatch import dispatch\ndispatch(['--help'])\nassert 'llmtrain_extras' in sys.modules\n"
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code + "assert 'torch' not in sys.modules"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)


def page_commands() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8")
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("llmtrain ")]


@pytest.mark.usefixtures("extras")
def test_the_commands_and_files_of_the_page_compose(tmp_path: Path) -> None:
    commands = page_commands()
    assert len(commands) >= 3
    for words in commands:
        assert topic_page(words[1], [], 100) if words[0] == "--help" else compose_config(words).config.plugins
    text = PAGE.read_text(encoding="utf-8")
    block = text.partition("# my_configs/experiment/cool.yaml\n")[2].partition("```")[0]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "cool.yaml").write_text(block)
    config = compose_config(["+experiment=cool"], config_dirs=[tmp_path]).config
    assert config.plugins["attention.tempered"].temperature == 2


@pytest.mark.slow
def test_pip_installs_the_page(tmp_path: Path) -> None:
    project, target = write_project(tmp_path / "project"), tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(project)], check=True, cwd=tmp_path)
    shown = run_python("--cfg", "job", "--resolve", *TEMPERED, site=target, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert yaml.safe_load(shown.stdout)["attention"]["tempered"] == {"temperature": 2.0}
    forget_plugins()
