"""The op on CPU tensors: right by the oracle, compiled, described by its schema, and its field cases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import kdagen
from kdagen import grading, reference
from kdagen.cases import matrix
from kdagen.errors import ArgumentError, NotReadyError
from tests.harness import assert_graded, copied, plain_arguments

BF16 = torch.bfloat16
H, C = 4, 512


@pytest.fixture(scope="module", autouse=True)
def loaded():
    kdagen.load()


def arguments(**changes):
    return {**plain_arguments(H, [1, 2, 3], 5), **changes}


@pytest.mark.parametrize("case", [c for h in (1, 4, 11) for c in matrix(h, quick=False)], ids=lambda c: c.token())
def test_the_cpu_path_is_the_oracle(case):
    call = case.arguments()
    expected = reference.fused_kda_decode(**{**call, "out": None})
    snapshot = grading.Snapshot(call)
    out = kdagen.fused_kda_decode(**call)
    rows, slots = case.live()
    assert out is call["out"]
    assert grading.state_error(call["state"][slots], expected.state[rows]) <= grading.STATE_TOLERANCE
    assert grading.output_ulps(out, expected.out) <= grading.OUTPUT_TOLERANCE_ULPS
    assert grading.differing_words(call["conv_state"][slots], expected.conv_state[rows]) == 0
    assert snapshot.stray_bytes(slots) == 0


def test_out_is_allocated_and_returned():
    call = arguments(out=None)
    before = copied(call)
    out = kdagen.fused_kda_decode(**call)
    assert out.shape == (1, 3, H, 128) and out.dtype == BF16
    assert_graded(before, {**call, "out": out})


def test_a_gate_with_a_leading_1_is_the_same():
    first, second = arguments(), arguments()
    second["output_gate"] = second["output_gate"].unsqueeze(0)
    assert torch.equal(kdagen.fused_kda_decode(**first), kdagen.fused_kda_decode(**second))


def test_fr_03_pools_of_unequal_length_are_refused_with_both_counts():
    conv = torch.zeros(4, 1536, 3, dtype=BF16)
    state = torch.zeros(8, H, 128, 128)
    with pytest.raises(ValueError, match="conv_state: expected as many slots as state, 8, got 4"):
        kdagen.fused_kda_decode(**arguments(conv_state=conv, state=state))


@pytest.mark.parametrize(("index", "message"), [(5, "slots below 5, got 5"), (1, "each live slot once, got 1 2 times")])
def test_fr_03_indices_can_be_checked(index, message):
    call = arguments(state_indices=torch.tensor([1, 2, index], dtype=torch.int32))
    before = copied(call)
    with pytest.raises(ArgumentError, match=f"state_indices: expected {message}"):
        kdagen.fused_kda_decode(**call, check_indices=True)
    assert all(grading.differing_words(call[name], before[name]) == 0 for name in ("state", "conv_state", "out"))


def test_fr_05_an_empty_batch_returns_an_empty_result():
    call = plain_arguments(12, [], 3)
    out = kdagen.fused_kda_decode(**{**call, "out": None})
    assert out.shape == (1, 0, 12, 128)


def test_fr_11_indices_of_another_rank_or_dtype_are_refused_and_a_column_is_read_with_its_stride():
    table = torch.tensor([[1, 9], [2, 9], [3, 9]], dtype=torch.int32)
    first, second = arguments(), arguments(state_indices=table[:, 0])
    assert torch.equal(kdagen.fused_kda_decode(**first), kdagen.fused_kda_decode(**second))


def test_fr_12_views_of_one_projection_are_taken_without_a_copy():
    wide = torch.full((3, 6288), torch.nan, dtype=BF16)
    call = plain_arguments(12, [1, 2, 3], 4)
    dense = copied(call)
    for name, start, width in (("x", 0, 4608), ("output_gate", 4608, 1536), ("raw_beta", 6272, 12)):
        wide[:, start : start + width] = call[name].reshape(3, width)
        call[name] = wide[:, start : start + width].reshape(call[name].shape)
        assert call[name].untyped_storage().data_ptr() == wide.untyped_storage().data_ptr()
    assert torch.equal(kdagen.fused_kda_decode(**call), kdagen.fused_kda_decode(**dense))


def test_fr_24_a_speculative_cache_or_batch_is_refused():
    with pytest.raises(
        ValueError, match=r"conv_state: expected 3 taps \(one token per row, no speculative tokens\), got 5"
    ):
        kdagen.fused_kda_decode(**arguments(conv_state=torch.zeros(5, 1536, 5, dtype=BF16)))
    with pytest.raises(ValueError, match=r"raw_g: expected shape \[1, 9, 4, 128\], got \[1, 3, 4, 128\]"):
        kdagen.fused_kda_decode(**arguments(x=arguments()["x"].repeat(3, 1)))


def test_fr_50_an_unloaded_op_names_load_and_prepare(monkeypatch):
    from kdagen import op

    monkeypatch.setattr(op, "_library", None)
    with pytest.raises(
        NotReadyError, match=r"expected kdagen.load\(\) before the first call \(kdagen.prepare\(\) before a"
    ):
        kdagen.fused_kda_decode(**arguments())


def test_fr_50_a_first_call_inside_a_capture_names_prepare(monkeypatch):
    from kdagen import op

    monkeypatch.setattr(op, "_capturing", lambda: True)
    with pytest.raises(NotReadyError, match=r"expected kdagen.prepare\(heads=\[4\]\) before the graph capture"):
        op._note_first_call(torch.device("cpu"), H, 1)
    with pytest.raises(NotReadyError, match=r"expected kdagen.prepare\(\) before the graph capture, got it inside one"):
        kdagen.prepare([H])
    monkeypatch.setattr(op, "_capturing", lambda: False)
    kdagen.prepare([H], device="cpu")
    monkeypatch.setattr(op, "_capturing", lambda: True)
    op._note_first_call(torch.device("cpu"), H, 1)


def test_fr_50_each_band_of_batches_has_a_first_call_of_its_own(monkeypatch):
    from kdagen import dispatch, op

    monkeypatch.setattr(op, "_ready", set())
    monkeypatch.setattr(op, "_limits", {})
    monkeypatch.setattr(dispatch, "arch_of", lambda index: "sm_90")
    first = dispatch.least_rows(12, "sm_90")
    assert len(first) > 1
    device = torch.device("cuda", 0)
    for rows in first:
        monkeypatch.setattr(op, "_capturing", lambda: True)
        with pytest.raises(NotReadyError, match=r"expected kdagen.prepare\(heads=\[12\]\) before the graph capture"):
            op._note_first_call(device, 12, rows)
        monkeypatch.setattr(op, "_capturing", lambda: False)
        op._note_first_call(device, 12, rows)
        monkeypatch.setattr(op, "_capturing", lambda: True)
        op._note_first_call(device, 12, rows)


def test_fr_52_opcheck_is_clean():
    call = arguments()
    torch.library.opcheck(torch.ops.kdagen.fused_kda_decode.default, tuple(call.values()))
    call = arguments(bias=None, lower_bound=None, output_gate=None, norm_weight=None)
    torch.library.opcheck(torch.ops.kdagen.fused_kda_decode.default, tuple(call.values()))


@pytest.mark.parametrize("dynamic", [False, True])
def test_fr_52_a_compiled_call_updates_a_view_of_a_stacked_pool_in_place(dynamic):
    def step(pools, convs, call):
        call = {**call, "state": pools[0], "conv_state": convs[0], "out": None}
        return kdagen.fused_kda_decode(**call)

    eager = arguments()
    states = torch.stack([eager["state"], torch.ones_like(eager["state"])])
    convs = torch.stack([eager["conv_state"].transpose(1, 2)] * 2).transpose(2, 3)
    compiled_states, compiled_convs = states.clone(), convs.clone()
    address = compiled_states.data_ptr()
    expected = step(states, convs, eager)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    got, (code,) = run_and_get_code(compiled, compiled_states, compiled_convs, arguments())
    assert len(re.findall(r"= empty_strided", code)) == 1, "a buffer beside out: a pool was copied"
    assert torch.equal(got, expected)
    assert torch.equal(compiled_states, states) and torch.equal(compiled_convs, convs)
    assert compiled_states.data_ptr() == address


def test_meta_tensors_have_shapes_and_no_values():
    call = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments(out=None).items()}
    out = kdagen.fused_kda_decode(**call)
    assert out.device.type == "meta" and out.shape == (1, 3, H, 128)


def test_fr_54_mixed_devices_are_refused_by_name():
    with pytest.raises(ValueError, match="state_indices: expected the device of x, cpu, got meta"):
        torch.ops.kdagen.fused_kda_decode(**arguments(state_indices=arguments()["state_indices"].to("meta")))


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("num_heads", [3, 4, 6, 8, 11, 12, 16, 24, 32, 48, 96])
def test_fr_71_the_cpu_path_takes_every_head_count(num_heads, rows):
    before = plain_arguments(num_heads, list(range(rows, 0, -1)), rows + 1, seed=num_heads)
    after = copied(before)
    kdagen.fused_kda_decode(**after)
    assert_graded(before, after)


def test_fr_71_unequal_head_counts_are_refused():
    state = torch.zeros(5, 2 * H, 128, 128)
    with pytest.raises(ValueError, match=r"x: expected shape \[\*, 3072\], got \[3, 1536\]"):
        kdagen.fused_kda_decode(**arguments(state=state))


def test_the_schema_is_the_contract():
    schema = torch.ops.kdagen.fused_kda_decode.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names == [
        *(
            "x",
            "weight",
            "bias",
            "conv_state",
            "raw_g",
            "raw_beta",
            "A_log",
            "dt_bias",
            "state_indices",
            "state",
            "out",
        ),
        *("lower_bound", "output_gate", "norm_weight", "norm_eps", "first_live_slot"),
    ]
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {"conv_state", "state", "out"}
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    assert defaults == {
        "lower_bound": None,
        "output_gate": None,
        "norm_weight": None,
        "norm_eps": 1e-5,
        "first_live_slot": 1,
    }
    assert [str(a.type) for a in schema.arguments if a.name in ("bias", "lower_bound")] == [
        "Optional[Tensor]",
        "Optional[float]",
    ]
    assert list(schema.returns) == []


def test_the_readme_call_runs():
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "fused_kda_decode" in block]
    assert blocks
    for block in blocks:
        exec(block, {})
