"""Any batch from 0 up: a grid's limits are not the user's problem."""

import torch

from kdagen import emulator
from kdagen.render import render
from tests.harness import assert_graded, cdna_variant, copied, plain_arguments, run


def test_a_batch_of_more_than_65535_rows():
    rows = 70_000
    arguments = plain_arguments(1, [1], 3)
    for name in ("x", "output_gate"):
        arguments[name] = arguments[name].expand(rows, *arguments[name].shape[1:]).contiguous()
    for name in ("raw_g", "raw_beta"):
        arguments[name] = arguments[name].expand(1, rows, *arguments[name].shape[2:]).contiguous()
    indices = torch.zeros(rows, dtype=torch.int32)
    indices[[0, 65_536, rows - 1]] = torch.tensor([1, 2, 0], dtype=torch.int32)
    arguments["state_indices"] = indices
    arguments["out"] = torch.full((1, rows, 1, 128), torch.nan, dtype=torch.bfloat16)
    before = copied(arguments)
    assert run(arguments, 1).workgroups == rows
    assert_graded(before, arguments)


def test_a_batch_past_the_threads_of_one_grid_takes_several_launches():
    """With the limit lowered to two rows a launch: the text's own loop, on a batch that a test can run."""
    text = render(cdna_variant(4))
    limit = "((1LL << 32) - 1) / kThreads / kTeam / kHeads"
    assert limit in text
    kernel = emulator.compile_source(text.replace(limit, "2"), lds_bytes=cdna_variant(4).plan.lds_bytes)
    before = plain_arguments(4, [3, 1, 0, 4, 2], 6)
    after = copied(before)
    report = emulator.run_decode(kernel, cdna_variant(4).launch_symbol, **after)
    assert report.faults == () and report.workgroups == 5 * 4
    assert_graded(before, after)
