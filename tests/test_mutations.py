"""`verify` can fail: every small mutation of a generated source is caught, with a symptom that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdagen import verify
from kdagen.cases import matrix
from kdagen.render import render
from tests.harness import cdna_variant

VARIANT = cdna_variant(4)
TEXT = render(VARIANT)

WRONG_RESULT = ("wrong state", "wrong output")

BARRIER = "  workgroup_barrier();\n"
FIRST_BARRIER = BARRIER + "\n  const float square_sum"
SECOND_BARRIER = BARRIER + "\n  if (work.section == kGates) {\n    const f32x2 o"

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
        "  float square_sum = 0.0f;\n#pragma",
        "  if (work.thread % 64 < 32) beta += sum_over_row(0.0f);\n  float square_sum = 0.0f;\n#pragma",
        ("divergence",),
    ),
    "change one DPP control": ("dpp<0x141, 0xf, 0xf>", "dpp<0x140, 0xf, 0xf>", WRONG_RESULT),
    "change one control of a halving": ("halve<0x141, 4>", "halve<0x140, 4>", WRONG_RESULT),
    "change one bit of a halving": ("halve<0x141, 4>", "halve<0x141, 2>", WRONG_RESULT),
    "tell a row another row's delta": ("rows[3] = dpp<0x156", "rows[3] = dpp<0x158", WRONG_RESULT),
    "publish the output of another row": ("lds.output[v] = o", "lds.output[v ^ 16] = o", ("wrong output",)),
    "scale the query by the norm of the key": (
        "sum_rows(along_q, lane) * q_norm",
        "sum_rows(along_q, lane) * k_norm",
        ("wrong output",),
    ),
    "count each row's square twice": ("* (1.0f / kLanesPerSum)", "* (2.0f / kLanesPerSum)", ("wrong output",)),
    "narrow one DPP row mask": ("dpp<0x4e, 0xf, 0xf>", "dpp<0x4e, 0x7, 0xf>", WRONG_RESULT),
    "a section that differs inside a wave": (
        "wave_uniform(thread / kPairs)",
        "wave_uniform((thread + 1) / kPairs)",
        ("not uniform",),
    ),
    "shift the conv window before it is read": (
        "  if (work.section != kGates) from_slot.history = load_history",
        "  if (work.section != kGates) store_bf16_pair(from_slot.window, 0);\n"
        "  if (work.section != kGates) from_slot.history = load_history",
        (*WRONG_RESULT, "wrong conv window"),
    ),
    "keep the conv window": (
        "    if constexpr (kTeam == 1) shift_window<kConvDs>(from_slot.window, history, conv.x);\n",
        "",
        ("wrong conv window",),
    ),
    "swap two taps": (
        "to_f32(history.tap[tap]), in.weight[tap]",
        "to_f32(history.tap[tap]), in.weight[tap < 2 ? 1 - tap : tap]",
        WRONG_RESULT,
    ),
    "forget the bias": ("f32x2 y = in.bias;", "f32x2 y = f32x2{0.0f, 0.0f};", WRONG_RESULT),
    "eps outside the sum": (
        "rsqrt_approx(sum_over_row(partial_dot(k, k)) + kL2NormEps)",
        "rsqrt_approx(sum_over_row(partial_dot(k, k)) + kL2NormEps * kDim)",
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
        "    if (work.section == kGates && owns_pair(work)) store_output(p, work, f32x2{0.0f, 0.0f});\n",
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
        "  from_slot.slice = load_slice(",
        "  store_state(from_slot.address.rows, from_slot.address.lane, f32x4{0.0f, 0.0f, 0.0f, 0.0f});\n"
        "  from_slot.slice = load_slice(",
        WRONG_RESULT,
    ),
    "two lanes own one row": (
        "{ return thread / kLanesPerRow; }",
        "{ return thread / kLanesPerRow & ~1; }",
        ("race",),
    ),
    "wrong norm divisor": ("* (1.0f / kDim)", "* (1.0f / (kDim - 1))", ("wrong output", "wrong rounding")),
    "forget the output gate": (
        "f32x2{sigmoid(gate[0]), sigmoid(gate[1])}",
        "f32x2{gate[0], gate[1]}",
        ("wrong output",),
    ),
    "skip one row group": (
        "update[i], update[i]}",
        "i ? update[i] : 0.0f, i ? update[i] : 0.0f}",
        WRONG_RESULT,
    ),
    "an LDS index past the end": (
        "&lds.square_sum[work.member * kRowGroups + work.thread / kLanesPerRow]",
        "&lds.square_sum[work.member * kRowGroups + work.thread / kLanesPerRow + 1]",
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
