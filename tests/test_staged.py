"""The staged mirrors: what they hold, when they are stale, and how they are restaged."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from kdagen.errors import ArgumentError
from kdagen.weights import (
    Mirror,
    StagedWeights,
    make_decode_conv1d_weight_loader,
    make_decode_norm_weight_loader,
    stage,
)
from tests.weights_harness import conv_mirror, packed_param, raises, same_bits, width_major

BF16 = torch.bfloat16


def loaded_layer() -> tuple[StagedWeights, torch.nn.Parameter, torch.nn.Parameter]:
    """Two mirrors that the loaders filled, of bf16 parameters."""
    weight, norm = packed_param(2, BF16), torch.nn.Parameter(torch.zeros(128, dtype=BF16))
    mirrors = {"weight": conv_mirror(2), "norm_weight": torch.zeros(128)}
    make_decode_conv1d_weight_loader([2] * 3, 1, 0, mirrors["weight"])(weight, torch.randn(6, 4).to(BF16))
    make_decode_norm_weight_loader(mirrors["norm_weight"])(norm, torch.ones(128))
    return stage(weight, norm_weight=norm, mirrors=mirrors), weight, norm


def step(weight: torch.nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()


UPDATES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "copy_": lambda w: w.copy_(torch.ones(6, 1, 4)),
    "view": lambda w: w[2:3].fill_(7.0),
    "detach": lambda w: w.detach().mul_(2.0),
    "optimizer": step,
    "a loader without this mirror": lambda w: make_decode_conv1d_weight_loader([2] * 3, 1, 0, None)(
        w, torch.ones(6, 4)
    ),
    "swapped storage": lambda w: setattr(w, "data", torch.ones(6, 1, 4, dtype=BF16)),
}


@pytest.mark.parametrize("update", UPDATES)
def test_a_mirror_is_fresh_after_loading_and_stale_after_an_update(update):
    staged, weight, _ = loaded_layer()
    assert not staged.is_stale() and staged.verify()
    addresses = [mirror.tensor.data_ptr() for mirror in staged.mirrors]
    with torch.no_grad():
        UPDATES[update](weight)
    assert staged.is_stale() and not staged.verify()
    staged.refresh()
    assert not staged.is_stale() and staged.verify()
    assert same_bits(staged.op_arguments()["weight"], width_major(weight))
    assert [mirror.tensor.data_ptr() for mirror in staged.mirrors] == addresses


def test_a_mirror_that_something_else_wrote_is_stale():
    staged, _, _ = loaded_layer()
    staged.mirrors[1].tensor.normal_()
    with pytest.raises(ArgumentError, match=r"^norm_weight: expected a mirror"):
        staged.op_arguments()


def test_verify_sees_what_the_counter_does_not():
    staged, weight, _ = loaded_layer()
    weight.data.fill_(3.0)
    assert not staged.is_stale(), "a limit that the docstring states"
    assert not staged.verify()


def test_loading_q_does_not_hide_that_k_and_v_are_stale():
    param, mirror = packed_param(2), conv_mirror(2)
    load = make_decode_conv1d_weight_loader([2] * 3, 1, 0, mirror)
    pair = Mirror("weight", param, mirror)
    for shard in range(3):
        assert pair.is_stale()
        load(param, torch.ones(2, 4), shard)
    assert not pair.is_stale()
    load(param, torch.zeros(2, 4), 0)
    assert not pair.is_stale() and pair.verify()
    with torch.no_grad():
        param.fill_(2.0)
    load(param, torch.ones(2, 4), 0)
    assert pair.is_stale()


def test_a_copied_layer_is_stale_until_it_is_refreshed():
    staged, _, _ = loaded_layer()
    twin = copy.deepcopy(staged)
    assert twin.is_stale() and not staged.is_stale()
    twin.refresh()
    assert not twin.is_stale()


def test_staging_makes_every_mirror_from_the_params_alone():
    weight, bias, norm = torch.randn(6, 1, 4).to(BF16), torch.randn(6).to(BF16), torch.randn(128)
    arguments = stage(weight, bias=bias, norm_weight=norm).op_arguments()
    assert same_bits(arguments["weight"], width_major(weight)) and arguments["weight"].is_contiguous()
    assert same_bits(arguments["bias"], bias.float()) and same_bits(arguments["norm_weight"], norm)
    assert arguments["norm_weight"].data_ptr() != norm.data_ptr()


def test_a_layer_is_refreshed_as_a_whole_or_not_at_all():
    staged, weight, norm = loaded_layer()
    with torch.no_grad():
        weight.fill_(5.0)
    norm.data = torch.zeros(64, dtype=BF16)
    before = staged.mirrors[0].tensor.clone()
    with raises(ArgumentError, "norm_weight: expected [64], got [128]"):
        staged.refresh()
    assert same_bits(staged.mirrors[0].tensor, before)


def test_a_mirror_that_cannot_be_written_is_found_before_anything_is():
    weight, norm = packed_param(2), torch.ones(128)
    with torch.inference_mode():
        mirrors = {"norm_weight": torch.zeros(128)}
    staged = stage(weight, norm_weight=norm, mirrors=mirrors)
    with torch.no_grad():
        weight.fill_(5.0)
    refused = "expected a tensor that can be written, got an inference tensor outside inference mode"
    for refresh in (staged.refresh, staged.mirrors[1].refresh):
        with raises(ArgumentError, f"norm_weight: {refused}"):
            refresh()
    assert staged.mirrors[0].tensor.isnan().all()
    param = torch.zeros(128)
    with raises(ArgumentError, f"mirror: {refused}"):
        make_decode_norm_weight_loader(mirrors["norm_weight"])(param, norm)
    assert (param == 0).all()


def test_a_mirror_that_exists_is_kept_as_it_is_and_stale_until_refreshed():
    mirror = conv_mirror(2)
    staged = stage(torch.zeros(6, 1, 4), mirrors={"weight": mirror})
    assert mirror.isnan().all() and staged.is_stale()
    staged.refresh()
    assert (mirror == 0).all() and staged.op_arguments()["weight"] is mirror


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": torch.zeros(7, 1, 4)}, "weight: expected [6, 1, 4], got [7, 1, 4]"),
        ({"weight": torch.zeros(6, 4)}, "weight: expected [6, 1, 4], got [6, 4]"),
        (
            {"weight": torch.zeros(6, 1, 4), "norm_weight": torch.zeros(2, 2)},
            "norm_weight: expected [4], got [2, 2]",
        ),
        (
            {"weight": torch.zeros(6, 1, 4), "mirrors": {"norm_weight": torch.zeros(4)}},
            "mirrors: expected names among weight, got norm_weight",
        ),
        (
            {"weight": torch.zeros(6, 1, 4), "mirrors": {"weight": torch.zeros(3, 2, 4)}},
            "weight: expected [3, 4, 2], got [3, 2, 4]",
        ),
    ],
)
def test_what_cannot_be_staged_is_refused(arguments, message):
    with raises(ArgumentError, message):
        stage(**arguments)


def test_inference_tensors_are_compared_by_value_and_written_in_their_mode_only():
    with torch.inference_mode():
        param, mirror = torch.zeros(6, 1, 4), torch.zeros(3, 4, 2)
        load = make_decode_conv1d_weight_loader([2] * 3, 1, 0, mirror)
        load(param, torch.ones(6, 4))
        staged = stage(param, mirrors={"weight": mirror})
        assert not staged.is_stale()
        param.fill_(2.0)
        assert staged.is_stale()
        staged.refresh()
        assert not staged.is_stale()
    with raises(
        ArgumentError, "param: expected a tensor that can be written, got an inference tensor outside inference mode"
    ):
        load(param, torch.ones(6, 4))
    with raises(
        ArgumentError, "weight: expected a tensor that can be written, got an inference tensor outside inference mode"
    ):
        staged.refresh()
    assert (param == 2).all() and (mirror == 2).all()


def test_a_mirror_staged_in_inference_mode_can_be_refreshed_outside():
    weight = torch.zeros(6, 1, 4)
    with torch.inference_mode():
        staged = stage(weight)
    weight.fill_(1.0)
    assert staged.is_stale()
    staged.refresh()
    assert (staged.op_arguments()["weight"] == 1).all()
