"""`verify` can fail: every small mutation of a generated source is caught, with a symptom that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdagen import verify
from kdagen.cases import matrix
from kdagen.render import render
from kdagen.variants import on_demand

VARIANT = on_demand(4)
TEXT = render(VARIANT)

WRONG_RESULT = ("wrong state", "wrong output")

BARRIER = "  workgroup_barrier();\n"
FIRST_BARRIER = BARRIER + "  let_next_kernel_start();\n"
SECOND_BARRIER = "publish_outputs(lds, outputs, thread);\n" + BARRIER

MUTATIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "drop the first barrier": (FIRST_BARRIER, FIRST_BARRIER.replace(BARRIER, ""), ("race", "uninitialised LDS")),
    "drop the second barrier": (SECOND_BARRIER, SECOND_BARRIER.replace(BARRIER, ""), ("race", "uninitialised LDS")),
    "drop the release fence": ('__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");', "", ("missing fence",)),
    "drop the acquire fence": ('__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");', "", ("missing fence",)),
    "a barrier that one wave skips": (
        FIRST_BARRIER,
        FIRST_BARRIER.replace("workgroup", "if (work.section != kValue) workgroup"),
        ("divergence",),
    ),
    "a reduction in half of a wave": (
        "  q = scaled(q, rsqrt_approx(dot(q, q)",
        "  if (thread % 64 < 32) q = scaled(q, rsqrt_approx(dot(q, q)",
        ("divergence",),
    ),
    "change one DPP control": ("dpp<0x141, 0xf, 0xf>", "dpp<0x140, 0xf, 0xf>", WRONG_RESULT),
    "narrow one DPP row mask": ("dpp<0x4e, 0xf, 0xf>", "dpp<0x4e, 0x7, 0xf>", WRONG_RESULT),
    "a section that differs inside a wave": (
        "wave_uniform(thread / kPairs)",
        "wave_uniform((thread + 1) / kPairs)",
        ("not uniform",),
    ),
    "shift the conv window before it is read": (
        "  if (work.section != kGates) history = load_history",
        "  if (work.section != kGates) store_bf16_pair(window, conv.x);\n"
        "  if (work.section != kGates) history = load_history",
        (*WRONG_RESULT, "wrong conv window"),
    ),
    "keep the conv window": ("    shift_window<kConvDs>(window, history, conv.x);\n", "", ("wrong conv window",)),
    "swap two taps": (
        "to_f32(history.tap[tap]), in.weight[tap]",
        "to_f32(history.tap[tap]), in.weight[tap < 2 ? 1 - tap : tap]",
        WRONG_RESULT,
    ),
    "forget the bias": ("f32x2 y = in.bias;", "f32x2 y = f32x2{0.0f, 0.0f};", WRONG_RESULT),
    "eps outside the sum": (
        "rsqrt_approx(dot(k, k) + kL2NormEps)",
        "rsqrt_approx(dot(k, k) + kL2NormEps * kDim)",
        WRONG_RESULT,
    ),
    "clamp the gate": (
        "kLog2E * lower_bound * sigmoid(a * g[i])",
        "kLog2E * (-a * softplus(g[i]) > lower_bound ? -a * softplus(g[i]) : lower_bound)",
        WRONG_RESULT,
    ),
    "drop dt_bias": ("to_f32(in.raw_g) + in.dt_bias", "to_f32(in.raw_g)", WRONG_RESULT),
    "sigmoid of beta twice": ("sigmoid(beta_logit)", "sigmoid(sigmoid(beta_logit))", WRONG_RESULT),
    "sigmoid of beta never": ("sigmoid(beta_logit)", "beta_logit", WRONG_RESULT),
    "drop the null compare": ("if (is_null_row(p, slot))", "if (p.rows < 0)", ("memory out of bounds",)),
    "a signed null compare": (
        "static_cast<unsigned>(slot) - static_cast<unsigned>(p.first_live_slot) >=\n"
        "         static_cast<unsigned>(p.live_slots)",
        "slot - p.first_live_slot >= p.live_slots",
        ("memory out of bounds",),
    ),
    "null rows leave out alone": (
        "    if (work.section == kGates) store_output(p, work, f32x2{0.0f, 0.0f});\n",
        "",
        ("null row", "wrong output"),
    ),
    "a 32-bit slot offset": (
        "p.state + slot * p.state_slot_stride",
        "p.state + static_cast<int>(slot * p.state_slot_stride)",
        ("memory out of bounds",),
    ),
    "the dense slot stride": (
        "slot * p.state_slot_stride",
        "slot * static_cast<long long>(kHeads * kDim * kDim)",
        ("memory out of bounds", *WRONG_RESULT),
    ),
    "the dense stride of raw_g": ("work.row * p.raw_g_row_stride", "work.row * kChannels", ("memory out of bounds",)),
    "the dense stride of out": ("work.row * p.out_row_stride", "work.row * kChannels", ("memory out of bounds",)),
    "store before load": (
        "  const StateSlice slice = load_slice(address);",
        "  store_state(shared_address(address, 0, 0), address.lane, f32x4{0.0f, 0.0f, 0.0f, 0.0f});\n"
        "  const StateSlice slice = load_slice(address);",
        WRONG_RESULT,
    ),
    "two lanes own one row": (
        "thread / kWaveLanes * kRowsPerWave + thread % kWaveLanes / kLanesPerRow;",
        "thread / kWaveLanes * kRowsPerWave + thread % kWaveLanes / kLanesPerRow / 2;",
        ("race",),
    ),
    "wrong norm divisor": ("* (1.0f / kDim)", "* (1.0f / (kDim - 1))", ("wrong output", "wrong rounding")),
    "forget the output gate": (
        "f32x2{sigmoid(gate[0]), sigmoid(gate[1])}",
        "f32x2{gate[0], gate[1]}",
        ("wrong output",),
    ),
    "skip one row group": (
        "  for (int i = 0; i < kRowsPerLane; ++i) {\n    Columns s;",
        "  for (int i = 1; i < kRowsPerLane; ++i) {\n    Columns s;",
        WRONG_RESULT,
    ),
    "an LDS index past the end": (
        "lds.square_sum[thread / kLanesPerRow] =",
        "lds.square_sum[thread / kLanesPerRow + 1] =",
        ("LDS out of bounds",),
    ),
    "truncate to bf16": (
        "static_cast<__bf16>(a[0])",
        "static_cast<unsigned short>(__builtin_bit_cast(unsigned, a[0]) >> 16)",
        ("wrong rounding",),
    ),
    "the state is rounded to bf16": (
        "const f32x4 four = slice.row[i][part];",
        "f32x4 four = slice.row[i][part];\n"
        "      for (int c = 0; c < 4; ++c) four[c] = to_f32(to_bf16(f32x2{four[c], four[c]}))[0];",
        WRONG_RESULT,
    ),
}


def verify_text(text: str, name: str) -> verify.CaseResult | None:
    """The first failing case of a text, or None."""
    cases = sorted(matrix(VARIANT.spec.num_heads, quick=False), key=lambda case: case.strides.value == "far")
    failures = verify.verify_variant(VARIANT, cases, source=text, stop_at_first=True).failures
    return failures[0] if failures else None


def test_the_readme_counts_them():
    readme = Path(__file__).parents[1] / "README.md"
    assert f"{len(MUTATIONS)} mutations of a generated source" in readme.read_text(encoding="utf-8")


def test_the_text_without_a_mutation_passes():
    assert verify_text(TEXT, "none") is None


@pytest.mark.parametrize("name", MUTATIONS)
def test_verify_catches(name):
    old, new, symptoms = MUTATIONS[name]
    assert old in TEXT, "the mutation no longer applies: follow the template"
    failure = verify_text(TEXT.replace(old, new, 1), name)
    assert failure is not None, "verify passed the mutated source"
    assert any(symptom.startswith(symptoms) for symptom in failure.symptoms), failure.symptoms
