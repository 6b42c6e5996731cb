"""Field cases of loading and staging, each by its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from kdagen import reference
from kdagen.errors import ArgumentError, WeightDTypeError
from kdagen.weights import (
    make_decode_conv1d_weight_loader,
    make_decode_norm_weight_loader,
    shard_A_log,
    shard_dt_bias,
    stage,
)
from tests.weights_harness import conv_mirror, packed_param, raises, same_bits, width_major

BF16, FP32 = torch.bfloat16, torch.float32


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("shape", [(96,), (1, 1, 96, 1)])
def test_fr_35_a_log_comes_in_two_shapes(shape):
    loaded = torch.arange(96, dtype=FP32).div(10).view(shape)
    local = shard_A_log(loaded, 96, 8, 3)
    assert same_bits(local, torch.arange(36, 48, dtype=FP32).div(10))
    loaded.zero_()
    assert (local != 0).all(), "a copy, not a view of the checkpoint"


@pytest.mark.parametrize("shape", [(12288,), (96, 128)])
def test_fr_35_dt_bias_comes_in_two_shapes(shape):
    flat = torch.arange(12288, dtype=FP32)
    assert same_bits(shard_dt_bias(flat.view(shape), 96, 8, 3), flat[36 * 128 : 48 * 128])


@pytest.mark.parametrize(
    ("shard", "shape", "expected"),
    [
        (shard_A_log, (1, 96), "A_log: expected [96] or [1, 1, 96, 1], got [1, 96]"),
        (shard_A_log, (1, 2, 48, 1), "A_log: expected [96] or [1, 1, 96, 1], got [1, 2, 48, 1]"),
        (shard_A_log, (1, 1, 1, 96), "A_log: expected [96] or [1, 1, 96, 1], got [1, 1, 1, 96]"),
        (shard_A_log, (12,), "A_log: expected [96] or [1, 1, 96, 1], got [12]"),
        (shard_dt_bias, (96, 1, 128), "dt_bias: expected [12288] or [96, 128], got [96, 1, 128]"),
        (shard_dt_bias, (128, 96), "dt_bias: expected [12288] or [96, 128], got [128, 96]"),
    ],
)
def test_fr_35_any_other_shape_is_a_value_error(shard, shape, expected):
    with raises(ArgumentError, expected) as caught:
        shard(torch.zeros(shape), 96, 8, 3)
    assert isinstance(caught.value, ValueError)


def test_fr_37_fp32_survives_an_ambient_bf16():
    with default_dtype(BF16):
        A_log = shard_A_log(torch.full((4,), 1.9459101, dtype=FP32), 4, 2, 1)
        dt_bias = shard_dt_bias(torch.full((4, 128), -4.6051702, dtype=FP32), 4, 2, 1)
        staged = stage(packed_param(4, BF16), norm_weight=torch.ones(128))
    assert same_bits(A_log, torch.full((2,), 1.9459101, dtype=FP32))
    assert same_bits(dt_bias, torch.full((256,), -4.6051702, dtype=FP32))
    assert {mirror.tensor.dtype for mirror in staged.mirrors} == {FP32}


@pytest.mark.parametrize("loaded_dtype", [FP32, BF16])
def test_fr_37_a_conv_weight_is_stored_as_it_came(loaded_dtype):
    param, mirror = packed_param(2), conv_mirror(2)
    loaded = torch.full((6, 4), 1.9459101).to(loaded_dtype)
    with default_dtype(BF16):
        make_decode_conv1d_weight_loader([2] * 3, 1, 0, mirror)(param, loaded)
    assert same_bits(mirror, loaded.float().reshape(3, 4, 2)) and same_bits(param.detach().view(6, 4), loaded.float())


def test_fr_37_a_bf16_param_refuses_what_it_would_round_and_takes_what_it_holds():
    param, mirror = packed_param(2, BF16), conv_mirror(2)
    load = make_decode_conv1d_weight_loader([2] * 3, 1, 0, mirror)
    message = (
        "param: expected torch.float32, which holds the loaded values exactly, got torch.bfloat16, which rounds them; "
        "make the parameter float32, or load loaded_weight.to(torch.bfloat16) if rounding is meant"
    )
    with raises(WeightDTypeError, message):
        load(param, torch.full((6, 4), 1.9459101))
    assert param.isnan().all() and mirror.isnan().all()
    load(param, torch.full((6, 4), 1.9453125))
    assert (mirror == 1.9453125).all()


@pytest.mark.parametrize("shape", [(1536, 4), (1536, 1, 4)])
def test_fr_39_conv_weights_come_in_two_ranks(shape):
    param, mirror = packed_param(1536), conv_mirror(1536)
    load = make_decode_conv1d_weight_loader([1536] * 3, 1, 0, mirror)
    loaded = torch.arange(1536, dtype=FP32)[:, None] + torch.arange(4) / 8
    for shard in range(3):
        load(param, loaded.view(shape), shard)
    assert same_bits(mirror, loaded.t().expand(3, 4, 1536)) and mirror.is_contiguous()


@pytest.mark.parametrize("shape", [(1536, 4, 1), (1536, 3), (4, 1536), (1536,), (1535, 4)])
def test_fr_39_any_other_shape_is_named(shape):
    load = make_decode_conv1d_weight_loader([1536] * 3, 1, 0, conv_mirror(1536))
    with raises(ArgumentError, f"loaded_weight: expected [1536, 4] or [1536, 1, 4], got {list(shape)}"):
        load(packed_param(1536), torch.zeros(shape), 0)


def test_fr_40_each_of_q_k_v_is_cut():
    param, mirror = packed_param(1536), conv_mirror(1536)
    rows = torch.arange(9216, dtype=FP32)[:, None].expand(9216, 4)
    make_decode_conv1d_weight_loader([3072] * 3, 2, 1, mirror)(param, rows)
    shards = torch.arange(3)[:, None, None] * 3072
    assert same_bits(mirror, (shards + 1536 + torch.arange(1536)).float().expand(3, 4, 1536))
    assert mirror[:, 0, 0].tolist() == [1536, 4608, 7680]
    assert same_bits(mirror, width_major(param))


@pytest.mark.parametrize(("num_heads", "tp_size"), [(96, 5), (96, 7), (32, 3), (96, 64)])
def test_fr_42_heads_that_do_not_divide_are_refused_with_both_numbers(num_heads, tp_size):
    makers: list[Callable[[], object]] = [
        lambda: make_decode_conv1d_weight_loader([num_heads * 128] * 3, tp_size, 0, None),
        lambda: shard_A_log(torch.zeros(num_heads), num_heads, tp_size, 0),
        lambda: shard_dt_bias(torch.zeros(num_heads * 128), num_heads, tp_size, 0),
    ]
    for make in makers:
        with raises(ArgumentError, f"tp_size: expected a divisor of the {num_heads} heads, got {tp_size}"):
            make()


@pytest.mark.parametrize("tp_rank", [8, -1, True, 0.0])
def test_fr_42_a_rank_outside_the_group_is_refused(tp_rank):
    for make in (
        lambda: make_decode_conv1d_weight_loader([12288] * 3, 8, tp_rank, None),
        lambda: shard_A_log(torch.zeros(96), 96, 8, tp_rank),
        lambda: shard_dt_bias(torch.zeros(12288), 96, 8, tp_rank),
    ):
        with raises(ArgumentError, f"tp_rank: expected an int from 0 to 7, got {tp_rank!r}"):
            make()


def test_fr_44_a_stale_mirror_is_refused_and_a_refreshed_one_is_the_new_weight():
    generator = torch.Generator().manual_seed(44)
    first, second = (torch.randn(3 * 128, 1, 4, generator=generator) for _ in range(2))
    x = torch.randn(1, 384, generator=generator).to(BF16)
    rest = dict(
        x=x,
        bias=None,
        conv_state=torch.zeros(2, 384, 3, dtype=BF16),
        raw_g=torch.zeros(1, 1, 1, 128, dtype=BF16),
        raw_beta=torch.zeros(1, 1, 1, dtype=BF16),
        A_log=torch.zeros(1),
        dt_bias=torch.zeros(128),
        state_indices=torch.tensor([1], dtype=torch.int32),
        state=torch.zeros(2, 1, 128, 128),
    )
    mirror = conv_mirror(128)
    param = packed_param(128)
    make_decode_conv1d_weight_loader([128] * 3, 1, 0, mirror)(param, first)
    staged = stage(param, mirrors={"weight": mirror})
    old = reference.fused_kda_decode(**rest, **staged.op_arguments()).out
    with torch.no_grad():
        param.copy_(second)
    message = (
        "weight: expected a mirror of the parameter as it is now, got one not staged since the parameter or the mirror "
        "changed; call refresh()"
    )
    with raises(ArgumentError, message):
        staged.op_arguments()
    address = mirror.data_ptr()
    staged.refresh()
    assert same_bits(mirror, width_major(second)) and mirror.data_ptr() == address
    new = reference.fused_kda_decode(**rest, **staged.op_arguments()).out
    expected = reference.fused_kda_decode(**rest, weight=width_major(second)).out
    assert same_bits(new, expected) and not torch.equal(new, old)


CODES = [torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", CODES)
def test_fr_48_codes_without_a_scale_are_refused_by_name(dtype):
    loads: list[tuple[str, Callable[[], object]]] = []
    param, mirror, norm, norm_mirror = (
        packed_param(2),
        conv_mirror(2),
        torch.full((128,), torch.nan),
        torch.full((128,), torch.nan),
    )
    ones = torch.ones(2, 4).to(dtype)
    loads.append(("loaded_weight", lambda: make_decode_conv1d_weight_loader([2] * 3, 1, 0, mirror)(param, ones, 1)))
    loads.append(
        ("loaded_weight", lambda: make_decode_norm_weight_loader(norm_mirror)(norm, torch.ones(128).to(dtype)))
    )
    loads.append(("A_log", lambda: shard_A_log(torch.ones(4).to(dtype), 4, 1, 0)))
    loads.append(("dt_bias", lambda: shard_dt_bias(torch.ones(512).to(dtype), 4, 1, 0)))
    for name, load in loads:
        message = (
            f"{name}: expected one of float32, bfloat16, float16, float64 without a scale, got {dtype} without a scale"
        )
        with raises(WeightDTypeError, message) as caught:
            load()
        assert isinstance(caught.value, TypeError)
    assert all(t.isnan().all() for t in (param, mirror, norm, norm_mirror))


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), torch.full((1,), 0.5), torch.full((2, 1), 0.5, dtype=BF16)])
@pytest.mark.parametrize("dtype", CODES)
def test_fr_48_codes_are_multiplied_by_their_scale(dtype, scale):
    param, mirror = packed_param(2), conv_mirror(2)
    load = make_decode_conv1d_weight_loader([2] * 3, 1, 0, mirror)
    load(param, torch.ones(2, 4).to(dtype), 1, scale=scale)
    assert (mirror[1] == 0.5).all() and (param[2:4] == 0.5).all()
    assert mirror[[0, 2]].isnan().all()


def test_fr_48_a_scale_given_as_a_number_is_fp32_under_an_ambient_bf16():
    mirror = conv_mirror(2)
    load = make_decode_conv1d_weight_loader([2] * 3, 1, 0, mirror)
    with default_dtype(BF16):
        load(packed_param(2), torch.ones(6, 4, dtype=torch.int8), scale=0.3)
    assert same_bits(mirror, torch.full((3, 4, 2), 0.3))


def test_fr_48_one_scale_per_channel_is_cut_with_its_channels():
    param, mirror = packed_param(2), conv_mirror(2)
    load = make_decode_conv1d_weight_loader([4] * 3, 2, 1, mirror)
    load(param, torch.ones(12, 4, dtype=torch.int8), scale=torch.arange(12, dtype=FP32))
    assert mirror[:, 0].tolist() == [[2, 3], [6, 7], [10, 11]]


def test_fr_48_a_norm_weight_with_its_scale():
    param, mirror = torch.zeros(128, dtype=BF16), torch.zeros(128)
    make_decode_norm_weight_loader(mirror)(param, torch.ones(128, dtype=torch.int8), scale=0.5)
    assert (mirror == 0.5).all() and (param == 0.5).all()


@pytest.mark.parametrize(
    ("loaded", "scale", "error", "message"),
    [
        (
            torch.ones(2, 4),
            0.5,
            WeightDTypeError,
            "loaded_weight: expected one of int8, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz with a "
            "scale, got torch.float32 with a scale",
        ),
        (
            torch.ones(2, 4, dtype=torch.int8),
            torch.ones(2, dtype=torch.int32),
            WeightDTypeError,
            "scale: expected one of float32, bfloat16, float16, float64, got torch.int32",
        ),
        (
            torch.ones(2, 4, dtype=torch.int8),
            torch.ones(4),
            ArgumentError,
            "scale: expected [] or [1] or [2] or [2, 1] or [2, 1, 1], got [4]",
        ),
    ],
)
def test_fr_48_a_scale_that_does_not_belong_is_refused(loaded, scale, error, message):
    param, mirror = packed_param(2), conv_mirror(2)
    with raises(error, message):
        make_decode_conv1d_weight_loader([2] * 3, 1, 0, mirror)(param, loaded, 0, scale=scale)
    assert param.isnan().all() and mirror.isnan().all()
