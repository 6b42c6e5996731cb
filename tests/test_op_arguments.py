"""Every argument of the op given wrong, one at a time and at random: refused in words, and nothing written."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kdagen
from kdagen import grading
from tests.harness import assert_graded, plain_arguments

BF16 = torch.bfloat16
H = 4


@pytest.fixture(scope="module", autouse=True)
def loaded():
    kdagen.load()


def arguments(**changes):
    return {**plain_arguments(H, [1, 2, 3], 5), **changes}


def wider(tensor: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """The same values with a gap after every innermost row."""
    gapped = torch.empty((*tensor.shape[:-1], tensor.size(-1) + elements), dtype=tensor.dtype)
    gapped[..., : tensor.size(-1)] = tensor
    return gapped[..., : tensor.size(-1)]


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


def odd_slots(tensor: torch.Tensor) -> torch.Tensor:
    slots, elements = tensor.size(0), tensor[0].numel()
    pages = torch.empty(slots, elements + 1, dtype=tensor.dtype)
    return pages[:, :elements].unflatten(1, tensor.shape[1:]).copy_(tensor)


A = arguments()
WRONG = {
    "x dtype": ({"x": A["x"].half()}, "x: expected bfloat16, got float16"),
    "x rank": ({"x": A["x"][0]}, "x: expected shape [*, 1536], got [1536]"),
    "x size": ({"x": A["x"][:, :-1]}, "x: expected shape [*, 1536], got [3, 1535]"),
    "x stride": ({"x": A["x"].t().contiguous().t()}, "x: expected strides [*, 1] (* is free), got [1, 3]"),
    "weight dtype": ({"weight": A["weight"].bfloat16()}, "weight: expected float32, got bfloat16"),
    "weight rank": ({"weight": A["weight"][0]}, "weight: expected shape [3, 4, 512], got [4, 512]"),
    "weight order": (
        {"weight": A["weight"].transpose(1, 2).contiguous()},
        "weight: expected shape [3, 4, 512], got [3, 512, 4]",
    ),
    "weight stride": (
        {"weight": wider(A["weight"])},
        "weight: expected strides [2048, 512, 1] (* is free), got [2052, 513, 1]",
    ),
    "bias dtype": ({"bias": A["bias"].bfloat16()}, "bias: expected float32, got bfloat16"),
    "bias size": ({"bias": A["bias"][:-1]}, "bias: expected shape [1536], got [1535]"),
    "bias stride": ({"bias": torch.zeros(3072)[::2]}, "bias: expected strides [1] (* is free), got [2]"),
    "conv_state dtype": ({"conv_state": A["conv_state"].float()}, "conv_state: expected bfloat16, got float32"),
    "conv_state rank": ({"conv_state": A["conv_state"][0]}, "conv_state: expected shape [*, 1536, 3], got [1536, 3]"),
    "conv_state taps": (
        {"conv_state": torch.zeros(5, 1536, 5, dtype=BF16)},
        "conv_state: expected 3 taps (one token per row, no speculative tokens), got 5",
    ),
    "conv_state channels": (
        {"conv_state": A["conv_state"][:, :-1]},
        "conv_state: expected shape [*, 1536, 3], got [5, 1535, 3]",
    ),
    "conv_state slots": ({"conv_state": A["conv_state"][:4]}, "conv_state: expected as many slots as state, 5, got 4"),
    "conv_state stride": (
        {"conv_state": wider(A["conv_state"].contiguous())},
        "conv_state: expected strides [*, 1, 1536] (* is free), got [6144, 4, 1]",
    ),
    "conv_state overlap": (
        {"conv_state": torch.zeros(1, 3, 1536, dtype=BF16).transpose(1, 2).expand(5, -1, -1)},
        "conv_state: expected a stride of 4608 or more in dimension 0, got 0",
    ),
    "raw_g dtype": ({"raw_g": A["raw_g"].float()}, "raw_g: expected bfloat16, got float32"),
    "raw_g rank": ({"raw_g": A["raw_g"][0]}, "raw_g: expected shape [1, 3, 4, 128], got [3, 4, 128]"),
    "raw_g stride": (
        {"raw_g": wider(A["raw_g"])},
        "raw_g: expected strides [*, *, 128, 1] (* is free), got [1548, 516, 129, 1]",
    ),
    "raw_beta dtype": ({"raw_beta": A["raw_beta"].float()}, "raw_beta: expected bfloat16, got float32"),
    "raw_beta size": ({"raw_beta": A["raw_beta"][:, :, :3]}, "raw_beta: expected shape [1, 3, 4], got [1, 3, 3]"),
    "raw_beta stride": (
        {"raw_beta": A["raw_beta"].transpose(1, 2).contiguous().transpose(1, 2)},
        "raw_beta: expected strides [*, *, 1] (* is free), got [12, 1, 3]",
    ),
    "A_log dtype": ({"A_log": A["A_log"].bfloat16()}, "A_log: expected float32, got bfloat16"),
    "A_log rank": ({"A_log": A["A_log"].view(1, 1, H, 1)}, "A_log: expected shape [4], got [1, 1, 4, 1]"),
    "dt_bias size": ({"dt_bias": A["dt_bias"].view(H, 128)}, "dt_bias: expected shape [512], got [4, 128]"),
    "state_indices dtype": ({"state_indices": A["state_indices"].long()}, "state_indices: expected int32, got int64"),
    "state_indices rank": (
        {"state_indices": A["state_indices"].unsqueeze(1)},
        "state_indices: expected shape [3], one per row of x, got [3, 1]",
    ),
    "state_indices size": (
        {"state_indices": A["state_indices"][:2]},
        "state_indices: expected shape [3], one per row of x, got [2]",
    ),
    "state dtype": ({"state": A["state"].bfloat16()}, "state: expected float32, got bfloat16"),
    "state rank": ({"state": A["state"][0]}, "state: expected shape [*, *, 128, 128], got [4, 128, 128]"),
    "state head dim": ({"state": A["state"][..., :64]}, "state: expected shape [*, *, 128, 128], got [5, 4, 128, 64]"),
    "state stride": (
        {"state": A["state"].transpose(2, 3)},
        "state: expected strides [*, 16384, 128, 1] (* is free), got [65536, 16384, 1, 128]",
    ),
    "state address": (
        {"state": misaligned(A["state"])},
        "state: expected data aligned to 16 bytes, got an address 4 bytes past that",
    ),
    "state slot stride": (
        {"state": odd_slots(A["state"])},
        "state: expected slots aligned to 16 bytes, got a slot stride of 65537 elements",
    ),
    "state overlap": (
        {"state": A["state"][:1].expand(5, -1, -1, -1)},
        "state: expected a stride of 65536 or more in dimension 0, got 0",
    ),
    "out dtype": ({"out": A["out"].float()}, "out: expected bfloat16, got float32"),
    "out size": ({"out": A["out"][:, :2]}, "out: expected shape [1, 3, 4, 128], got [1, 2, 4, 128]"),
    "out stride": (
        {"out": wider(A["out"])},
        "out: expected strides [*, *, 128, 1] (* is free), got [1548, 516, 129, 1]",
    ),
    "out overlap": (
        {"out": A["out"][:, :1].expand(-1, 3, -1, -1)},
        "out: expected a stride of 512 or more in dimension 1, got 0",
    ),
    "gate without weight": (
        {"norm_weight": None},
        "norm_weight: expected a tensor, since output_gate is given, got None",
    ),
    "weight without gate": (
        {"output_gate": None},
        "output_gate: expected a tensor, since norm_weight is given, got None",
    ),
    "output_gate dtype": ({"output_gate": A["output_gate"].float()}, "output_gate: expected bfloat16, got float32"),
    "output_gate size": (
        {"output_gate": A["output_gate"][:2]},
        "output_gate: expected shape [3, 4, 128] or with a leading 1, got [2, 4, 128]",
    ),
    "output_gate stride": (
        {"output_gate": wider(A["output_gate"])},
        "output_gate: expected strides [*, 128, 1] (* is free), got [516, 129, 1]",
    ),
    "norm_weight dtype": ({"norm_weight": A["norm_weight"].bfloat16()}, "norm_weight: expected float32, got bfloat16"),
    "norm_weight size": ({"norm_weight": A["norm_weight"][:64]}, "norm_weight: expected shape [128], got [64]"),
    "lower_bound positive": (
        {"lower_bound": 5.0},
        "lower_bound: expected a finite number below 0, or None for the softplus gate, got 5.000000",
    ),
    "lower_bound nan": (
        {"lower_bound": math.nan},
        "lower_bound: expected a finite number below 0, or None for the softplus gate, got nan",
    ),
    "norm_eps": ({"norm_eps": -1.0}, "norm_eps: expected a finite number of 0 or more, got -1.000000"),
    "first_live_slot": ({"first_live_slot": -1}, "first_live_slot: expected a slot of 0 or more, got -1"),
}
for _name in [name for name, value in A.items() if isinstance(value, torch.Tensor) and name != "x"]:
    WRONG[f"{_name} device"] = ({_name: A[_name].to("meta")}, f"{_name}: expected the device of x, cpu, got meta")
WRONG["x device"] = ({"x": A["x"].to("meta")}, "weight: expected the device of x, meta, got cpu")


def assert_nothing_written(call, before):
    for name, value in before.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            assert grading.differing_words(call[name], value) == 0 if value.element_size() != 8 else True, name


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_in_words_and_nothing_is_written(name):
    changes, message = WRONG[name]
    call = arguments(**changes)
    before = {key: copy.deepcopy(value) for key, value in call.items()}
    with pytest.raises(ValueError) as raised:
        torch.ops.kdagen.fused_kda_decode(**call)
    assert str(raised.value).startswith(message)
    assert_nothing_written(call, before)


CHANGES = st.dictionaries(
    st.sampled_from([name for name, value in A.items() if isinstance(value, torch.Tensor)]),
    st.sampled_from(["half", "slice", "unsqueeze", "transpose", "wider", "none", "strided", "empty", "misaligned"]),
    max_size=2,
)


def changed(tensor: torch.Tensor, how: str) -> torch.Tensor | None:
    return {
        "half": lambda: tensor.half() if tensor.is_floating_point() else tensor.long(),
        "slice": lambda: tensor[..., :-1],
        "unsqueeze": lambda: tensor.unsqueeze(0),
        "transpose": lambda: tensor.transpose(0, -1),
        "wider": lambda: wider(tensor),
        "none": lambda: None,
        "strided": lambda: torch.stack([tensor, tensor], dim=-1)[..., 0],
        "empty": lambda: tensor[:0],
        "misaligned": lambda: misaligned(tensor),
    }[how]()


@settings(max_examples=300, deadline=None)
@given(changes=CHANGES, bound=st.sampled_from([-5.0, None, 0.0]), first=st.sampled_from([0, 1, 9]))
def test_any_arguments_give_the_right_answer_or_a_clear_error(changes, bound, first):
    call = arguments(lower_bound=bound, first_live_slot=first)
    for name, how in changes.items():
        call[name] = changed(call[name], how)
    before = {key: copy.deepcopy(value) for key, value in call.items()}
    try:
        out = kdagen.fused_kda_decode(**call)
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        assert str(error)
        assert_nothing_written(call, before)
    else:
        assert_graded(before, {**call, "out": out})
