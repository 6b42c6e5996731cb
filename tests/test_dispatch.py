import subprocess
import sys
import time

import pytest
import torch

import kdagen
from kdagen import dispatch
from kdagen.errors import NoKernelError
from kdagen.spec import ConvLayout, DType, LayerShape
from kdagen.target import CDNA, CUDA
from kdagen.variants import VARIANTS, of_target, variants_of
from tests.harness import ABSENT

BF16 = torch.bfloat16
CDNA_VARIANTS = of_target(CDNA)
SERVED = ", ".join(str(count) for count in sorted(variant.spec.num_heads for variant in CDNA_VARIANTS))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(dispatch, "_on_demand", {})


@pytest.fixture
def on_mi300x(monkeypatch):
    from kdagen import op

    monkeypatch.setattr(dispatch, "current_arch", lambda: "gfx942")
    monkeypatch.setattr(op, "is_loaded", lambda: True)


def test_the_registry_is_the_table():
    assert [(k.name, k.num_heads, k.most_work, k.source, k.launch_symbol) for k in dispatch.table()] == [
        (v.name, v.spec.num_heads, v.band.most_work, v.file_name, v.launch_symbol) for v in VARIANTS
    ]


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("layout", ConvLayout)
def test_fr_14_fr_71_every_row_of_the_table_is_found_exactly(arch, layout):
    for variant in CDNA_VARIANTS:
        shape = LayerShape(variant.spec.num_heads, conv_layout=layout)
        assert dispatch.find(shape, arch).name == variant.name
        assert kdagen.why_unsupported(shape, arch) is None


REFUSED = [
    (
        LayerShape(ABSENT),
        "gfx942",
        f"num_heads: expected one of {SERVED}, got {ABSENT}; `kdagen.load(heads=[{ABSENT}])` builds one",
    ),
    (LayerShape(12, head_dim=64), "gfx942", "head_dim: expected 128, got 64"),
    (LayerShape(12, conv_width=3), "gfx942", "conv_width: expected 4, got 3"),
    (LayerShape(12, num_spec=2), "gfx942", "num_spec: expected 0, got 2"),
    (LayerShape(12, input_dtype="torch.float16"), "gfx942", "input_dtype: expected bf16, got torch.float16"),
    (LayerShape(12, conv_state_dtype=DType.FP32), "gfx942", "conv_state_dtype: expected bf16, got fp32"),
    (LayerShape(12, state_dtype=DType.BF16), "gfx942", "state_dtype: expected fp32, got bf16"),
    (LayerShape(12, conv_layout="other"), "gfx942", "conv_layout: expected one of SD, DS, got 'other'"),
    (LayerShape(12), "gfx1100", "arch: expected one of gfx90a, gfx942, gfx950, sm_90, got gfx1100"),
    (LayerShape(12), None, "arch: expected one of gfx90a, gfx942, gfx950, sm_90, got no GPU"),
]


@pytest.mark.parametrize(("shape", "arch", "reason"), REFUSED, ids=[reason.split(":")[0] for _, _, reason in REFUSED])
def test_fr_71_anything_else_is_refused_with_its_reason(shape, arch, reason):
    assert kdagen.why_unsupported(shape, arch).startswith(reason)
    with pytest.raises(NoKernelError) as raised:
        kdagen.find(shape, arch)
    assert str(raised.value).startswith(reason)


def test_each_target_has_its_own_kernel_of_a_head_count():
    assert kdagen.find(LayerShape(12), "gfx942").source == "kda_decode_h12_cdna.hip"
    assert kdagen.find(LayerShape(12), "sm_90", rows=256).source == "kda_decode_h12_cuda.cu"


@pytest.mark.parametrize("heads", sorted({variant.spec.num_heads for variant in of_target(CUDA)}))
def test_each_band_of_batches_has_its_own_kernel(heads):
    bands = {kernel.name: kernel for kernel in dispatch.by_work(heads, "sm_90")}
    assert [v.name for v in variants_of(heads, CUDA)] == list(bands)
    smallest = dispatch.least_rows(heads, "sm_90")
    assert [dispatch.find(LayerShape(heads), "sm_90", rows).name for rows in smallest] == list(bands)
    for rows in range(1, 300):
        work = dispatch.find(LayerShape(heads), "sm_90", rows).most_work
        lower = [
            k.most_work for k in bands.values() if k.most_work is not None and (work is None or k.most_work < work)
        ]
        assert (work is None or rows * heads <= work) and all(rows * heads > limit for limit in lower)


def test_a_kernel_built_on_demand_joins():
    dispatch.register(dispatch.Kernel("x", ABSENT, None, "cdna", ("gfx942",), "x.hip", "x_launch"))
    assert dispatch.find(LayerShape(ABSENT), "gfx942").source == "x.hip"
    assert f"{SERVED}, {ABSENT}, got" in kdagen.why_unsupported(LayerShape(ABSENT + 1), "gfx942")


def test_the_seeds_signature_says_yes_for_what_is_served(on_mi300x):
    for variant in CDNA_VARIANTS:
        assert kdagen.is_fused_kda_decode_supported(variant.spec.num_heads, 128, 4, 0, BF16, BF16)
        assert kdagen.is_fused_kda_decode_supported(variant.spec.num_heads, 128, 4, 0, BF16, BF16, torch.float32)


@pytest.mark.parametrize(
    "arguments",
    [
        (ABSENT, 128, 4, 0, BF16, BF16),
        (12, 64, 4, 0, BF16, BF16),
        (12, 128, 3, 0, BF16, BF16),
        (12, 128, 4, 2, BF16, BF16),
        (12, 128, 4, 0, torch.float16, BF16),
        (12, 128, 4, 0, BF16, torch.float32),
        (12, 128, 4, 0, BF16, BF16, BF16),
    ],
)
def test_fr_24_the_seeds_signature_says_no_for_anything_else(on_mi300x, arguments):
    assert kdagen.is_fused_kda_decode_supported(*arguments) is False


def test_the_seeds_signature_says_no_on_other_devices_and_without_the_op(on_mi300x, monkeypatch):
    from kdagen import op

    monkeypatch.setattr(op, "is_loaded", lambda: False)
    assert not kdagen.is_fused_kda_decode_supported(12, 128, 4, 0, BF16, BF16)
    monkeypatch.setattr(op, "is_loaded", lambda: True)
    for arch, served in (("gfx942", True), ("gfx950", True), ("gfx90a", False), ("gfx1100", False), (None, False)):
        monkeypatch.setattr(dispatch, "current_arch", lambda arch=arch: arch)
        assert kdagen.is_fused_kda_decode_supported(12, 128, 4, 0, BF16, BF16) is served


def test_the_seeds_signature_works_on_the_meta_device_and_compiles_nothing(on_mi300x, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("started a process"))
    with torch.device("meta"):
        assert kdagen.is_fused_kda_decode_supported(12, 128, 4, 0, BF16, BF16)
    start = time.perf_counter()
    for _ in range(1000):
        kdagen.is_fused_kda_decode_supported(12, 128, 4, 0, BF16, BF16)
    print(f"{(time.perf_counter() - start) * 1000:.1f} us a call")


def test_without_a_rocm_torch_there_is_no_arch():
    assert dispatch.current_arch() is None
    assert kdagen.is_fused_kda_decode_supported(12, 128, 4, 0, BF16, BF16) is False


def test_the_public_names_are_there_and_an_unknown_one_is_an_attribute_error():
    for name in kdagen.__all__:
        assert getattr(kdagen, name) is not None, name
    assert dir(kdagen) == kdagen.__all__
    with pytest.raises(AttributeError, match="module 'kdagen' has no attribute 'nonsense'"):
        kdagen.nonsense  # noqa: B018


def test_importing_costs_little_beyond_torch():
    script = "import torch, time; t = time.perf_counter(); import kdagen; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    print(f"import kdagen: {float(done.stdout) * 1000:.1f} ms beyond torch")
