"""Generated pages are those the code would write now, and every failure mode has its tests or says where they are owed."""

from helpers.scripts import ROOT, load_script

from llmtrain.plan.attention import ATTENTION

make_docs = load_script("make_docs")


def test_generated_pages_are_up_to_date():
    assert (ROOT / "docs/training.md").read_text() == make_docs.training_page()
    assert (ROOT / "docs/attention.md").read_text() == make_docs.attention_page()
    assert (ROOT / "docs/options.md").read_text() == make_docs.options_page()
    assert (ROOT / "docs/failure-modes.md").read_text() == make_docs.failure_modes_page()


def test_the_precision_table_holds_every_option_and_role():
    table = make_docs.precision_table().splitlines()
    assert table[0] == "| tensor | `fp32` | `bf16` |"
    assert "| weights | fp32 | fp32 |" in table and "| matmul | fp32 | bf16 |" in table and len(table) == 2 + 11


def test_the_attention_tables_hold_every_backend_and_kernel_and_say_what_never_ran():
    lines = make_docs.attention_tables().splitlines()
    kernels = [line for line in lines if line.count("|") == 13 and line.startswith("| `")]
    assert len(kernels) == sum(len(row.kernels) for row in ATTENTION.values())
    assert all(line.endswith("| not yet run |") == ("| cpu |" not in line) for line in kernels)
    assert len([line for line in lines if line.count("|") == 5 and line.startswith("| `")]) == len(ATTENTION)


def test_every_failure_mode_has_tests_or_a_part_it_waits_for():
    for line in make_docs.failure_modes_page().splitlines():
        if line.startswith("| B"):
            fault, _, tests, owed = (cell.strip() for cell in line.strip("|").split("|"))
            assert tests != "–" or owed != "–", fault
