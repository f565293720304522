"""What is printed: fits the width, holds no control characters off a terminal, repeats warnings, ends with what to type next."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len

from llmtrain.metrics.console import CARD_LINES, Console, JsonConsole, PlainConsole, Row, Tone, card_lines, make_console
from llmtrain.metrics.console_rich import RichConsole, bar
from llmtrain.metrics.meters import StepRecord
from llmtrain.metrics.noise import collect_noise

CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

ROWS = [
    Row("device", "cpu · 2 threads · bf16 matmul 870 GFLOP/s (auto: no CUDA, no MPS)"),
    Row("model", "tiny · 1.1M parameters · 4 layers × 128"),
    Row("data", "Python's own library · 31.4M bytes train · 1.6M validation (whole modules held out) · 漢字"),
    Row("batch", "16 sequences × 256 tokens = 4,096 tokens/update = 1 micro-batch × 16 × 1 rank"),
    Row("chosen", "attention sdpa (auto: flash_attn needs CUDA) · micro-batch 16 (auto: forecast 214 MiB)"),
    Row("forecast", "peak 214 MiB: params 4 · grads 4 · optimizer 8 · activations 180 · other 18"),
    Row("resume", "llmtrain run.name=tiny train.steps=1000 'data.path=my texts'", is_command=True),
]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class LogFile(io.StringIO):
    encoding = "utf-8"


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = dict(
        step=step,
        tokens=4096 * step,
        loss=1.8,
        lr=3.1e-4,
        grad_norm=0.62,
        step_seconds=0.1,
        tokens_per_second=40960.0,
        mfu=0.31,
    )
    return StepRecord(**(values | changes))


def whole_run(console: Console, steps: int = 40) -> None:
    console.status("preparing data " + "with many words " * 12)
    console.card("llmtrain 0.1  train · run runs/tiny", ROWS)
    console.warn("bf16 is emulated on this CPU, which is slow: precision=fp32 is likely faster here than what was asked for")
    console.line("resumed from step-00000010 " + "with many words " * 12)
    console.start_training(first_step=0, total_steps=1000, log_every=10, baseline_loss=3.25781)
    for step in range(1, steps + 1):
        console.step(record(step, val_loss=1.9 if step % 20 == 0 else None, peak_memory_bytes=219 * 2**20))
        console.warn(
            "bf16 is emulated on this CPU, which is slow: precision=fp32 is likely faster here than what was asked for"
        )
    console.status("saving")
    console.block(
        "done", ["1000 steps in 1:52 · val 1.774 (2.56 bits/byte)", "no batch skipped · last save step-00001000"], Tone.GOOD
    )
    console.block("sample", ["def read(self):\n\treturn '\x1b[31mred\x07 [bold]not bold[/bold] :smile:"])
    console.next(["llmtrain generate runs/tiny 'generate.prompt=import '", "llmtrain plan model=llama3_1b cluster=rtx_4090"])
    console.close()


def visible_lines(text: str) -> list[str]:
    return [line for part in CONTROL_SEQUENCE.sub("", text).split("\n") for line in part.split("\r")]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_plain_lines_fit_and_hold_no_control_characters(width: int) -> None:
    stream = LogFile()
    whole_run(PlainConsole(stream, width))
    text = stream.getvalue()
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert all(character == "\n" or character.isprintable() for character in text)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_terminal_lines_fit(width: int) -> None:
    stream = Terminal()
    whole_run(RichConsole(stream, width))
    lines = visible_lines(stream.getvalue())
    assert max(cell_len(line) for line in lines) <= width
    assert all(character.isprintable() for line in lines for character in line)
    assert any("[bold]not bold[/bold] :smile:" in line for line in lines) or width < 60, "text is no markup"


def test_plain_log_has_one_line_per_log_every_and_evaluation() -> None:
    stream = LogFile()
    whole_run(PlainConsole(stream, 120))
    steps = [line for line in stream.getvalue().splitlines() if line.startswith("step ")]
    assert [(int(line.split("/")[0].split()[-1]), "val" in line) for line in steps] == [
        (1, False),
        (10, False),
        (20, False),
        (20, True),
        (30, False),
        (40, False),
        (40, True),
    ]
    assert steps[1].startswith(
        "step   10/1000  loss 1.8000  lr 3.1e-4  gnorm 0.62  41k tok/s  MFU 31 % (causal)  219 MiB  eta "
    )
    assert steps[3] == "step   20/1000  loss 1.8000  val 1.9000  (frequencies alone: 3.2578)"


def test_last_step_of_this_process_is_printed() -> None:
    stream = LogFile()
    console = PlainConsole(stream)
    console.start_training(first_step=7, total_steps=9, log_every=100)
    console.step(record(8))
    console.step(record(9))
    console.close()
    assert [line.split("/")[0] for line in stream.getvalue().splitlines()] == ["step 8", "step 9"]


def test_speed_is_that_of_the_window_and_eta_of_this_process() -> None:
    now = [0.0]
    stream = LogFile()
    console = PlainConsole(stream, clock=lambda: now[0])
    console.start_training(first_step=100, total_steps=200, log_every=2)
    for step, seconds in ((101, 9.0), (102, 1.0), (103, 1.0), (104, 3.0)):
        now[0] += seconds
        console.step(
            record(step, step_seconds=seconds, tokens_per_second=1000 / seconds, mfu=0.3 / seconds, skipped=step == 104)
        )
    console.close()
    last = stream.getvalue().splitlines()[-1]
    # 2000 tokens in the 4 seconds of steps 103 and 104; 96 steps left at 14 seconds for 4.
    assert "500 tok/s" in last and "MFU 15 % (causal)" in last and "eta 5:36" in last and "skipped 1" in last


def test_bar_line_of_the_terminal() -> None:
    stream = Terminal()
    console = RichConsole(stream, 80)
    console.start_training(first_step=0, total_steps=1000, log_every=10)
    console.step(record(690, val_loss=1.9))
    console.step(record(700, peak_memory_bytes=219 * 2**20))
    console.close()
    first, second = [line for line in visible_lines(stream.getvalue()) if line.strip()][-2:]
    assert first.startswith(" step  700/1000 ━━━") and first.endswith("loss 1.8000  val 1.9000  lr 3.1e-4  gnorm 0.62")
    assert second.strip().startswith("41k tok/s · MFU 31 % (causal) · 219 MiB · eta ")


def test_bar_is_filled_by_the_fraction() -> None:
    assert bar(0.5, 10).plain == "━━━━━─────"
    assert bar(2.0, 4).plain == "━━━━" and bar(0.0, 4).plain == "────" and bar(0.5, 0).plain == ""


def test_colours_on_a_terminal_only_for_good_and_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    whole_run(RichConsole(stream, 80))
    colours = {int(code) for code in re.findall(r"\x1b\[(?:\d+;)*(3\d)m", stream.getvalue())}
    assert colours == {31, 32}


@pytest.mark.parametrize("make", [lambda s: PlainConsole(s, 80), lambda s: RichConsole(s, 80)], ids=["plain", "rich"])
def test_warnings_are_numbered_and_repeated_before_the_end(make: Callable[[Any], Console]) -> None:
    stream = Terminal()
    console = make(stream)
    console.warn("first")
    console.warn("second")
    console.warn("first")
    console.block("done", ["well"])
    console.next(["llmtrain report runs/a"])
    console.close()
    lines = [line for line in visible_lines(stream.getvalue()) if line.strip()]
    assert lines == [
        "warning 1  first",
        "warning 2  second",
        "done  well",
        "warning 1  first",
        "warning 2  second",
        "next  llmtrain report runs/a",
    ]


def test_warnings_are_repeated_also_when_there_is_nothing_next() -> None:
    stream = LogFile()
    console = PlainConsole(stream)
    console.warn("first")
    console.close()
    assert stream.getvalue().splitlines() == ["warning 1  first"] * 2


@pytest.mark.parametrize("width", [40, 80, 160])
def test_card_has_at_most_14_aligned_lines(width: int) -> None:
    many = [*ROWS, *(Row(f"more {index}", "many words of explanation " * 10) for index in range(4))]
    for rows in (ROWS, many):
        lines = card_lines("title " * 50, rows, width)
        commands = [line for line in lines if line.startswith("  resume") or "train.steps" in line or "data.path" in line]
        assert len(lines) - len(commands) <= CARD_LINES
        assert max(map(cell_len, lines)) <= width
        column = 2 + max(len(row.label) for row in rows) + 2
        assert all(line[:2] == "  " and line[column - 2 : column] == "  " and line[column:].strip() for line in lines[1:])
        for row in rows:
            assert any(line.startswith(f"  {row.label} ") for line in lines)
    assert "…" in "".join(lines)


def test_a_long_command_and_rows_cut_last_leave_the_reasons_in_a_card() -> None:
    reason = "blocked (auto: faster than sdpa on a CPU, keeps no T × T matrix either; " + "flash_attn: needs CUDA; " * 5 + ")"
    command = "llmtrain " + " ".join(f"data.path=folder/number/{index}" for index in range(20))
    rows = [*(Row(f"fact {index}", "many words " * 10) for index in range(8)), Row("attention", reason, cut_last=True)]
    lines = card_lines("title", [*rows, Row("resume", command, is_command=True)], 80)
    at = next(index for index, line in enumerate(lines) if line.startswith("  resume"))
    assert at == CARD_LINES and len(lines) > CARD_LINES
    assert reason in " ".join(" ".join(lines[:at]).split())


def test_a_log_file_has_the_whole_card() -> None:
    stream = LogFile()
    rows = [Row(f"row {index}", f"words {index} " * 40) for index in range(20)]
    PlainConsole(stream, 80).card("title", rows)
    told = " ".join(stream.getvalue().split())
    assert "…" not in told and all(row.text.strip() in told for row in rows)
    assert max(map(len, stream.getvalue().splitlines())) <= 80


def test_card_never_cuts_a_command() -> None:
    rows = [Row("resume", "llmtrain " + " ".join(f"data.path=folder/number/{index}" for index in range(6)), is_command=True)]
    lines = card_lines("title", rows + [Row(f"r{index}", "words " * 60) for index in range(7)], 60)
    assert len([line for line in lines if "words" in line]) == CARD_LINES - 1
    command = "\n".join(line.strip() for line in lines[1:] if "data.path" in line or "llmtrain" in line)
    pasted = command.replace("resume", "", 1).replace("\\\n", "").split()
    assert pasted == rows[0].text.split()


def test_a_lasting_status_is_repeated_while_nothing_else_is_printed() -> None:
    stream = LogFile()
    console = PlainConsole(stream, 80, silence_seconds=0.02)
    console.status("tokenizing 3/300 files")
    wait_until(lambda: stream.getvalue().count("… tokenizing 3/300 files (0:00)") >= 2)
    console.status("tokenizing 200/300 files")
    wait_until(lambda: "… tokenizing 200/300 files (0:00)" in stream.getvalue())
    console.status("tokenizing " + "a very long name " * 10)
    wait_until(lambda: "tokenizing a very long" in stream.getvalue())
    console.status("")
    assert max(map(cell_len, stream.getvalue().splitlines())) <= 80
    console.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "console status"]


def test_status_ends_with_the_next_step() -> None:
    stream = LogFile()
    now = [0.0]
    console = PlainConsole(stream, 80, clock=lambda: now[0], silence_seconds=0.02)
    console.start_training(first_step=0, total_steps=100, log_every=50)
    console.status("evaluating")
    console.step(record(2))
    now[0] += 100
    time.sleep(0.02)
    console.close()
    assert stream.getvalue() == ""


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("never happened")


def test_spinner_shows_the_status_and_goes() -> None:
    stream = Terminal()
    console = RichConsole(stream, 60)
    console.status("tokenizing 3/300 files")
    console.line("a line that stays")
    wait_until(lambda: "tokenizing 3/300 files (0:00)" in stream.getvalue())
    console.close()
    lines = [line for line in visible_lines(stream.getvalue()) if line.strip()]
    assert any("a line that stays" in line for line in lines)
    assert stream.getvalue().rstrip().endswith("\x1b[?25h") or "\x1b[2K" in stream.getvalue(), "the last state was erased"


def test_json_prints_one_document_and_nothing_else_on_standard_output() -> None:
    out, err = Terminal(), LogFile()
    console = make_console("json", out, err)
    whole_run(console)
    assert out.getvalue() == ""
    console.document({"loss": 1.5, "text": "é"})
    assert json.loads(out.getvalue()) == {"loss": 1.5, "text": "é"}
    assert "step   10/1000" in err.getvalue() and "next  llmtrain" in err.getvalue()


def test_a_document_with_values_that_are_not_finite_is_json() -> None:
    out = LogFile()
    make_console("json", out, LogFile()).document({"loss": float("nan"), "deep": [{"perplexity": float("inf")}]})

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    read = json.loads(out.getvalue(), parse_constant=refuse)
    assert read == {"loss": "NaN", "deep": [{"perplexity": "Infinity"}]}


def test_an_empty_status_leaves_the_terminal_to_others() -> None:
    """What a verb then prints by itself is not drawn over, also not when the console is closed."""
    stream = Terminal()
    console = RichConsole(stream, 60)
    console.status("loading")
    wait_until(lambda: "loading" in stream.getvalue())
    console.status("")
    said = stream.getvalue()
    time.sleep(0.6)  # more than two redraws
    console.close()
    assert stream.getvalue() == said


def test_an_empty_status_keeps_the_bar_of_a_training() -> None:
    stream = Terminal()
    console = RichConsole(stream, 80)
    console.start_training(first_step=0, total_steps=10, log_every=1)
    console.step(record(3))
    console.status("evaluating")
    console.status("")
    before = stream.getvalue().count("step  3/10")
    wait_until(lambda: stream.getvalue().count("step  3/10") > before)
    console.close()


def test_documents_are_for_json_only() -> None:
    stream = LogFile()
    PlainConsole(stream).document({"loss": 1.5})
    assert stream.getvalue() == ""


def test_the_console_fits_the_stream() -> None:
    latin = Terminal()
    latin.encoding = "latin-1"  # type: ignore[misc]
    assert isinstance(make_console("table", Terminal(), LogFile(), 80), RichConsole)
    assert isinstance(make_console("table", LogFile(), Terminal(), 80), PlainConsole)
    assert isinstance(make_console("table", latin, LogFile(), 80), PlainConsole)
    assert isinstance(make_console("json", Terminal(), Terminal(), 80), JsonConsole)


def test_a_stream_of_few_characters_gets_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    PlainConsole(stream).line("4 layers × 128")
    assert raw.getvalue() == b"4 layers ? 128\n"


def test_noise_of_dependencies_becomes_numbered_warnings_or_nothing() -> None:
    stream = LogFile()
    console = PlainConsole(stream, 80)
    shown_before = warnings.showwarning
    with collect_noise(console):
        warnings.warn("this affects you\nand here is a stack", stacklevel=1)
        warnings.warn("use the new name", DeprecationWarning, stacklevel=1)
        warnings.warn("will change", FutureWarning, stacklevel=1)
        logging.getLogger("some.library").warning("chatter")
        logging.getLogger("some.library").error("broken %d", 3)
    assert stream.getvalue().splitlines() == ["warning 1  this affects you", "warning 2  some.library: broken 3"]
    assert warnings.showwarning is shown_before
    assert not [handler for handler in logging.getLogger().handlers if "Console" in type(handler).__name__]
    console.close()


def test_a_training_goes_on_when_its_reader_is_gone() -> None:
    class Pipe(io.StringIO):
        lines = 0

        def flush(self) -> None:
            self.lines += 1
            if self.lines > 3:
                raise BrokenPipeError

    stream = Pipe()
    whole_run(PlainConsole(stream, 100))
    assert stream.lines == 4
