"""The kernels on a real GPU against the fp64 oracle: `pytest -m gpu`. Works on ROCm and CUDA builds of torch alike."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kdagen
from kdagen import dispatch, grading, reference
from kdagen.cases import Strides, matrix
from kdagen.spec import INSTANCES, ConvLayout, Gate, OutputNorm
from tests.harness import ABSENT, assert_graded, copied, plain_arguments

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
BF16 = torch.bfloat16
HEADS = (4, 12, 24, 96)


@pytest.fixture(scope="module", autouse=True)
def prepared():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    kdagen.prepare(HEADS)


def on_device(arguments):
    """The same call on the GPU: every storage is copied once, and the same views are taken of the copy."""
    storages: dict[int, torch.Tensor] = {}
    moved = dict(arguments)
    for name, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages:
                storages[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).cuda()
            flat = storages[storage.data_ptr()].view(tensor.dtype)
            moved[name] = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return moved


def snapshot_of(call):
    return {name: call[name].clone() for name in ("out", "state", "conv_state")}


def assert_same_bits(call, expected):
    for name, value in expected.items():
        assert grading.differing_words(call[name], value) == 0, name


CASES = [case for heads in HEADS for case in matrix(heads, quick=False) if case.strides is not Strides.FAR]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.token())
def test_the_emulators_matrix(case):
    arguments = case.arguments()
    expected = reference.fused_kda_decode(**{**arguments, "out": None})
    call = on_device(arguments)
    snapshot = grading.Snapshot(call)
    out = kdagen.fused_kda_decode(**call)
    rows, slots = case.live()
    assert grading.state_error(call["state"][slots].cpu(), expected.state[rows]) <= grading.STATE_TOLERANCE
    assert grading.output_ulps(out.cpu(), expected.out) <= grading.OUTPUT_TOLERANCE_ULPS
    assert grading.misrounded_share(out.cpu(), expected.out) <= grading.MISROUNDED_SHARE
    assert grading.differing_words(call["conv_state"][slots].cpu(), expected.conv_state[rows]) == 0
    assert snapshot.stray_bytes(slots) == 0
    null = [row for row in range(case.rows) if row not in rows]
    assert (out[0, null] == 0).all()


def test_fr_01_padding_rows_are_zero_and_touch_no_slot():
    call = on_device(plain_arguments(12, [3, 0, 0, 1], 5))
    call["x"][1:3] = torch.nan
    before = snapshot_of(call)
    out = kdagen.fused_kda_decode(**call)
    assert (out[0, 1:3] == 0).all() and out.isfinite().all()
    for name in ("state", "conv_state"):
        assert grading.differing_words(call[name][[0, 2, 4]], before[name][[0, 2, 4]]) == 0


def test_fr_05_an_empty_batch_launches_nothing_and_the_next_call_is_right():
    assert kdagen.fused_kda_decode(**on_device({**plain_arguments(12, [], 3), "out": None})).shape == (1, 0, 12, 128)
    arguments = plain_arguments(12, [1], 3)
    expected = reference.fused_kda_decode(**{**arguments, "out": None})
    out = kdagen.fused_kda_decode(**on_device(arguments))
    assert grading.output_ulps(out.cpu(), expected.out) <= 1


@pytest.mark.parametrize("layout", ["sd", "ds"])
def test_fr_09_the_slot_past_2_31_elements_is_reached(layout):
    slot = 10923
    small = plain_arguments(12, [1], 2)
    if layout == "ds":
        small["conv_state"] = small["conv_state"].contiguous()
    expected = reference.fused_kda_decode(**{**small, "out": None})
    call = on_device(small)
    state = torch.zeros(slot + 1, 12, 128, 128, device="cuda")
    strides = call["conv_state"].stride()
    conv = torch.zeros((slot + 1) * 4608 * 3, dtype=BF16, device="cuda").as_strided((slot + 1, 4608, 3), strides)
    state[slot], conv[slot] = call["state"][1], call["conv_state"][1]
    call |= {"state": state, "conv_state": conv, "state_indices": torch.tensor([slot], dtype=torch.int32).cuda()}
    out = kdagen.fused_kda_decode(**call)
    assert grading.output_ulps(out.cpu(), expected.out) <= 1
    assert grading.state_error(state[slot : slot + 1].cpu(), expected.state) <= grading.STATE_TOLERANCE
    assert not state[:slot].any() and not conv[:slot].any()


@pytest.mark.parametrize("rows", [1, 64, 192, 1024])
def test_fr_18_fifty_runs_give_the_same_bits(rows):
    slots = rows + 1
    g = torch.Generator("cuda").manual_seed(0)
    call = on_device(plain_arguments(12, [1], 2))
    for name in ("x", "output_gate"):
        call[name] = torch.randn(rows, *call[name].shape[1:], device="cuda", generator=g).to(BF16)
    for name in ("raw_g", "raw_beta"):
        call[name] = torch.randn(1, rows, *call[name].shape[2:], device="cuda", generator=g).to(BF16)
    call["state"] = torch.randn(slots, 12, 128, 128, device="cuda", generator=g)
    call["conv_state"] = torch.randn(slots, 3, 4608, device="cuda", generator=g).to(BF16).transpose(1, 2)
    call["state_indices"] = (torch.randperm(rows, device="cuda", generator=g) + 1).int()
    call["out"] = torch.empty(1, rows, 12, 128, dtype=BF16, device="cuda")
    before = snapshot_of(call)
    first = None
    for _ in range(50):
        call["state"].copy_(before["state"])
        call["conv_state"].copy_(before["conv_state"])
        call["out"].fill_(torch.nan)
        kdagen.fused_kda_decode(**call)
        if first is None:
            first = snapshot_of(call)
            old = before["conv_state"][call["state_indices"].long()]
            shifted = torch.cat([old[:, :, 1:], call["x"].unsqueeze(2)], dim=2)
            assert torch.equal(call["conv_state"][call["state_indices"].long()], shifted)
        assert_same_bits(call, first)


def test_fr_20_nan_in_a_stale_slot_stays_there():
    call = on_device(plain_arguments(12, [1, 2, 0], 8))
    call["state"][3:] = torch.nan
    call["conv_state"][3:] = torch.nan
    before = snapshot_of(call)
    assert kdagen.fused_kda_decode(**call).isfinite().all()
    for name in ("state", "conv_state"):
        assert grading.differing_words(call[name][3:], before[name][3:]) == 0


def test_fr_50_a_prepared_capture_replays_with_new_inputs():
    call = on_device(plain_arguments(12, [1, 2, 3], 4))
    eager = {**copied(call)}
    before = snapshot_of(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kdagen.fused_kda_decode(**call)
    for name, value in before.items():
        call[name].copy_(value)
    for step in range(3):
        new = plain_arguments(12, [1, 2, 3], 4, seed=step)["x"].cuda()
        call["x"].copy_(new)
        eager["x"].copy_(new)
        graph.replay()
        kdagen.fused_kda_decode(**eager)
        torch.cuda.synchronize()
        assert_same_bits(call, {name: eager[name] for name in before})


def test_fr_50_an_unprepared_capture_is_refused_and_not_spoiled():
    script = """
import torch, kdagen
from tests.gpu.test_gpu import on_device, plain_arguments
call = on_device(plain_arguments(12, [1], 2))
kdagen.load()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    try:
        kdagen.fused_kda_decode(**call)
    except RuntimeError as error:
        print(error)
    call["x"].add_(1)
graph.replay()
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "expected kdagen.prepare(heads=[12]) before the graph capture" in done.stdout


def test_prepare_touches_no_slot_and_a_head_count_on_demand_runs():
    heads = ABSENT
    kdagen.prepare([heads])
    arguments = plain_arguments(heads, [1, 2], 3)
    expected = reference.fused_kda_decode(**{**arguments, "out": None})
    assert grading.output_ulps(kdagen.fused_kda_decode(**on_device(arguments)).cpu(), expected.out) <= 1


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda instance: instance.name)
@pytest.mark.parametrize("heads", [12, 96])
def test_every_band_of_batches(heads, instance):
    arch = dispatch.current_arch()
    for rows in dispatch.least_rows(heads, arch):
        norm, bounded = instance.output_norm is OutputNorm.GATED, instance.gate is Gate.BOUNDED
        slots = list(range(rows + 1, 1, -1))
        arguments = plain_arguments(heads, slots, rows + 2, seed=rows, norm=norm, bound=-5.0 if bounded else None)
        if instance.conv_layout is ConvLayout.DS:
            arguments["conv_state"] = arguments["conv_state"].contiguous()
        call = on_device(arguments)
        kdagen.fused_kda_decode(**call)
        on_host = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
        assert_graded(arguments, on_host)


@pytest.mark.parametrize("rows", dispatch.least_rows(12, "sm_90"))  # one of every band that starts early
def test_the_slots_that_count_are_those_that_the_kernel_before_wrote(rows):
    """A kernel that starts early may see older slots first. Here the op itself writes the next call's state_indices."""
    first, second = (on_device(plain_arguments(12, slots, rows + 3)) for slots in ([1], list(range(2, rows + 2))))
    kept = [(call[name], call[name].clone()) for call in (first, second) for name in ("state", "conv_state")]

    def restore():
        for tensor, value in kept:
            tensor.copy_(value)

    kdagen.fused_kda_decode(**second)
    expected = snapshot_of(second)
    # An output of slot * 2^-133, then one of 0, are the two halves of an int32 that is the slot.
    first["norm_weight"] = torch.ones(128, device="cuda")
    kdagen.fused_kda_decode(**first)
    wanted = torch.zeros(128, dtype=torch.float64, device="cuda")
    wanted[0 : 2 * rows : 2] = torch.arange(2, rows + 2, device="cuda") * 2.0**-133
    first["norm_weight"] = (wanted / first["out"][0, 0, 0].double()).float()
    second["state_indices"] = first["out"].view(torch.int32)[0, 0, 0, :rows]
    older = torch.arange(rows + 2, 2, -1, dtype=torch.int32, device="cuda")

    def step():
        restore()
        second["state_indices"].copy_(older)
        kdagen.fused_kda_decode(**first)
        kdagen.fused_kda_decode(**second)

    step()
    assert second["state_indices"].tolist() == list(range(2, rows + 2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(50):
        graph.replay()
        assert_same_bits(second, expected)


def test_fr_52_a_compiled_call_equals_eager():
    def step(call):
        return kdagen.fused_kda_decode(**call)

    eager, compiled = (on_device({**plain_arguments(12, [1, 2, 3], 4), "out": None}) for _ in range(2))
    pool = compiled["state"].data_ptr()
    expected = step(eager)
    got = torch.compile(step, fullgraph=True)(compiled)
    assert torch.equal(got, expected)
    assert torch.equal(compiled["state"], eager["state"]) and compiled["state"].data_ptr() == pool
    assert torch.equal(compiled["conv_state"], eager["conv_state"])


def test_fr_54_a_side_stream_is_kept_in_order_without_a_sync():
    call = on_device(plain_arguments(12, [1, 2, 3], 4))
    late = {**copied(call)}
    expected = kdagen.fused_kda_decode(**call).clone()
    x, big = late["x"].clone(), torch.randn(8192, 8192, device="cuda")
    late["x"].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            big = big @ big * 1e-4
        late["x"].copy_(x)
        out = kdagen.fused_kda_decode(**late)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fr_54_tensors_on_another_device_than_the_current_one():
    call = on_device(plain_arguments(12, [1, 2], 3))
    other = {k: v.to("cuda:1") if isinstance(v, torch.Tensor) else v for k, v in copied(call).items()}
    assert torch.equal(kdagen.fused_kda_decode(**other).cpu(), kdagen.fused_kda_decode(**call).cpu())


def test_fr_54_mixed_devices_are_refused_by_name():
    call = on_device(plain_arguments(12, [1, 2], 3))
    with pytest.raises(ValueError, match="state_indices: expected the device of x, cuda:0, got cpu"):
        kdagen.fused_kda_decode(**{**call, "state_indices": call["state_indices"].cpu()})


def test_support_is_reported_for_the_device_that_is_here():
    arch = dispatch.current_arch()
    assert kdagen.why_unsupported(kdagen.LayerShape(12), arch) is None
    assert kdagen.is_fused_kda_decode_supported(12, 128, 4, 0, BF16, BF16) is (arch in ("gfx942", "gfx950"))


def test_the_example_runs_on_the_device():
    command = [sys.executable, "examples/kda_layer.py", "--device", "cuda", "--tokens", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=_environment())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_is_silent(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    script = """
import torch, kdagen
from tests.gpu.test_gpu import on_device
from tests.harness import plain_arguments
from kdagen import dispatch
from kdagen.cases import matrix
kdagen.load()
for case in matrix(4, quick=True):
    kdagen.fused_kda_decode(**on_device(case.arguments()))
for rows in dispatch.least_rows(12, dispatch.current_arch()):
    kdagen.fused_kda_decode(**on_device(plain_arguments(12, list(range(1, rows + 1)), rows + 1)))
torch.cuda.synchronize()
"""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=_environment())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout


def _environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}
