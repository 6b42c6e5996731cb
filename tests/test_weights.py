"""The loaders: what they copy, and that what they refuse leaves no trace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdagen.errors import ArgumentError, KdagenError
from kdagen.weights import (
    Mirror,
    make_decode_conv1d_weight_loader,
    make_decode_norm_weight_loader,
    shard_A_log,
    shard_dt_bias,
    stage,
)
from tests.weights_harness import conv_mirror, packed_param, raises, same_bits, width_major

BF16, FP32 = torch.bfloat16, torch.float32


@st.composite
def layers(draw: st.DrawFn) -> tuple[int, int, torch.Tensor, torch.dtype, bool]:
    """Ranks, channels a rank, full packed weights [3 * ranks * channels, 4], param's dtype, one tensor or three."""
    tp_size, channels = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([FP32, BF16, torch.float16]))
    seed = draw(st.integers(0, 2**31))
    full = torch.randn(3 * tp_size * channels, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return tp_size, channels, full, dtype, draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(layers())
def test_shards_of_all_ranks_make_the_full_weight_and_mirrors_are_params_transposed(layer):
    tp_size, channels, full, dtype, packed = layer
    mirrors = []
    for rank in range(tp_size):
        param, mirror = packed_param(channels, dtype), conv_mirror(channels)
        load = make_decode_conv1d_weight_loader([tp_size * channels] * 3, tp_size, rank, mirror)
        if packed:
            load(param, full)
        else:
            for shard in (2, 0, 1):
                load(param, full.chunk(3)[shard].unsqueeze(1), shard)
        assert same_bits(mirror, width_major(param))
        assert not Mirror("weight", param, mirror).is_stale()
        mirrors.append(mirror)
    assert same_bits(torch.cat(mirrors, dim=2), width_major(full.unsqueeze(1)))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_head_shards_of_all_ranks_make_the_full_tensor(tp_size, local, old_form):
    heads = tp_size * local
    A_log, dt_bias = torch.randn(heads), torch.randn(heads * 128)
    A_loaded, dt_loaded = (A_log.view(1, 1, -1, 1), dt_bias.view(-1, 128)) if old_form else (A_log, dt_bias)
    ranks = range(tp_size)
    assert same_bits(torch.cat([shard_A_log(A_loaded, heads, tp_size, r) for r in ranks]), A_log)
    assert same_bits(torch.cat([shard_dt_bias(dt_loaded, heads, tp_size, r) for r in ranks]), dt_bias)


def break_rank(call: dict[str, object]) -> None:
    call["loaded_weight"] = call["loaded_weight"].reshape(-1)


def break_width(call: dict[str, object]) -> None:
    call["loaded_weight"] = call["loaded_weight"][:, :3]


def break_channels(call: dict[str, object]) -> None:
    call["loaded_weight"] = call["loaded_weight"][:-1]


def break_dtype(call: dict[str, object]) -> None:
    call["loaded_weight"] = call["loaded_weight"].to(torch.int8)


def break_last_value(call: dict[str, object]) -> None:
    call["loaded_weight"][-1, -1] = 1 + 2.0**-20
    call["param"].data = call["param"].data.to(BF16)


def break_shard(call: dict[str, object]) -> None:
    call["loaded_shard_id"] = 3


def break_param(call: dict[str, object]) -> None:
    call["param"] = packed_param(call["param"].shape[0])


def break_scale(call: dict[str, object]) -> None:
    call["loaded_weight"] = call["loaded_weight"].to(torch.int8)
    call["scale"] = torch.ones(call["loaded_weight"].shape[0] + 1)


def break_storage(call: dict[str, object]) -> None:
    call["loaded_weight"] = call["loaded_weight"].to("meta")


BREAKS = [f for name, f in sorted(globals().items()) if name.startswith("break_")]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(BREAKS), st.sampled_from([0, 1, 2, None]), st.integers(1, 4), st.integers(2, 5), st.data())
def test_a_failed_load_writes_nothing(broken, shard, tp_size, channels, data):
    rank = tp_size - 1 if broken is break_last_value else data.draw(st.integers(0, tp_size - 1))
    mirror = torch.randn(3, 4, channels)
    load = make_decode_conv1d_weight_loader([tp_size * channels] * 3, tp_size, rank, mirror)
    rows = tp_size * channels * (3 if shard is None else 1)
    param = torch.nn.Parameter(torch.randn(3 * channels, 1, 4).to(BF16).float())
    call = {"param": param, "loaded_weight": torch.zeros(rows, 4), "loaded_shard_id": shard, "scale": None}
    broken(call)
    param_before, mirror_before = call["param"].detach().clone(), mirror.clone()
    with pytest.raises(KdagenError):
        load(**call)
    assert call["param"].dtype == param_before.dtype
    assert same_bits(call["param"].detach().float(), param_before.float()) and same_bits(mirror, mirror_before)


def test_a_param_on_the_meta_device_is_checked_and_has_no_mirror():
    param, mirror = torch.empty(6, 1, 4, device="meta"), conv_mirror(2)
    load = make_decode_conv1d_weight_loader([2] * 3, 1, 0, mirror)
    load(param, torch.ones(2, 4), 0)
    load(param, torch.ones(2, 4, device="meta"), 0)
    with pytest.raises(ArgumentError):
        load(param, torch.ones(2, 3), 0)
    norm_mirror = torch.full((128,), torch.nan)
    make_decode_norm_weight_loader(norm_mirror)(torch.empty(128, device="meta"), torch.ones(128))
    assert mirror.isnan().all() and norm_mirror.isnan().all()


def test_without_a_mirror_the_param_alone_is_loaded_and_q_k_v_may_differ():
    param = torch.nn.Parameter(torch.zeros(6, 1, 4))
    load = make_decode_conv1d_weight_loader([2, 4, 6], 2, 1, None)
    load(param, torch.arange(12.0)[:, None].expand(12, 4))
    assert param[:, 0, 0].tolist() == [1, 4, 5, 9, 10, 11]
    norm = torch.zeros(128, dtype=BF16)
    make_decode_norm_weight_loader(None)(norm, torch.ones(128))
    assert (norm == 1).all()


def test_a_norm_weight_is_loaded_and_mirrored():
    loaded = torch.randn(128).to(BF16)
    param, mirror = torch.zeros(128, dtype=BF16), torch.full((128,), torch.nan)
    make_decode_norm_weight_loader(mirror)(param, loaded)
    assert same_bits(mirror, loaded.float()) and torch.equal(param, loaded)


def test_nan_in_a_checkpoint_is_loaded_as_it_is():
    param, mirror = packed_param(2, BF16), conv_mirror(2)
    loaded = torch.tensor([[torch.nan, float("inf"), -0.0, 1.0]]).expand(6, 4)
    make_decode_conv1d_weight_loader([2] * 3, 1, 0, mirror)(param, loaded)
    assert same_bits(mirror, width_major(param))
    assert Mirror("weight", param, mirror).verify()


# ---- what is refused when a loader is made or called


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([6, 6], 1, 0, None), "dims: expected the channels of q, k and v, got [6, 6]"),
        (([6, 6, 0], 1, 0, None), "dims: expected an int of 1 or more, got 0"),
        (([6, 6, 5], 3, 0, None), "tp_size: expected a divisor of the 5 channels, got 3"),
        (([6] * 3, 0, 0, None), "tp_size: expected an int of 1 or more, got 0"),
        (([2, 2, 4], 1, 0, conv_mirror(2)), "dims: expected equal channels of q, k and v for a mirror, got [2, 2, 4]"),
        (([4] * 3, 2, 0, conv_mirror(4)), "decode_conv1d_weight: expected [3, 4, 2], got [3, 4, 4]"),
        (
            ([2] * 3, 1, 0, conv_mirror(2).to(BF16)),
            "decode_conv1d_weight: expected a torch.float32 mirror, got torch.bfloat16",
        ),
        (
            ([2] * 3, 1, 0, torch.zeros(3, 2, 4).transpose(1, 2)),
            "decode_conv1d_weight: expected a contiguous mirror, got strides [8, 1, 4]",
        ),
    ],
)
def test_a_loader_that_could_not_load_is_not_made(arguments, message):
    with raises(ArgumentError, message):
        make_decode_conv1d_weight_loader(*arguments)


@pytest.mark.parametrize(
    ("param", "shard", "message"),
    [
        (torch.zeros(6, 4), 0, "param: expected [6, 1, 4], got [6, 4]"),
        (torch.zeros(12, 1, 4), 0, "param: expected [6, 1, 4], got [12, 1, 4]"),
        (
            torch.zeros(6, 1, 4, dtype=torch.float64),
            0,
            "param: expected torch.float32, torch.bfloat16 or torch.float16, got torch.float64",
        ),
        (torch.zeros(6, 1, 4), "q", "loaded_shard_id: expected 0 (q), 1 (k), 2 (v) or None, got 'q'"),
        (torch.zeros(6, 1, 4), -1, "loaded_shard_id: expected 0 (q), 1 (k), 2 (v) or None, got -1"),
        (torch.zeros(6, 1, 4), True, "loaded_shard_id: expected 0 (q), 1 (k), 2 (v) or None, got True"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(param, shard, message):
    mirror = conv_mirror(2)
    with raises(ArgumentError, message):
        make_decode_conv1d_weight_loader([2] * 3, 1, 0, mirror)(param, torch.ones(2, 4), shard)
    assert (param == 0).all() and mirror.isnan().all()


@pytest.mark.parametrize(
    ("mirror", "param", "loaded", "message"),
    [
        (torch.zeros(2, 64), None, None, "decode_norm_weight: expected [128], got [2, 64]"),
        (torch.zeros(128), torch.zeros(64), torch.zeros(64), "param: expected [128], got [64]"),
        (torch.zeros(128), torch.zeros(128), torch.zeros(1), "loaded_weight: expected [128], got [1]"),
        (None, torch.zeros(128), torch.zeros(1, 128), "loaded_weight: expected [128], got [1, 128]"),
    ],
)
def test_a_norm_weight_that_does_not_fit_is_refused(mirror, param, loaded, message):
    with raises(ArgumentError, message):
        make_decode_norm_weight_loader(mirror)(param, loaded)


def test_tensors_without_values_or_on_two_devices_are_refused():
    load = make_decode_conv1d_weight_loader([2] * 3, 1, 0, torch.empty(3, 4, 2, device="meta"))
    with raises(ArgumentError, "mirror: expected a mirror on cpu, with its parameter, got meta"):
        load(packed_param(2), torch.ones(2, 4), 0)
    load = make_decode_conv1d_weight_loader([2] * 3, 1, 0, None)
    with raises(ArgumentError, "loaded_weight: expected a tensor with values, got one on the meta device"):
        load(packed_param(2), torch.ones(2, 4, device="meta"), 0)
    with raises(ArgumentError, "weight: expected a parameter with values, got one on the meta device"):
        stage(torch.empty(6, 1, 4, device="meta"))
