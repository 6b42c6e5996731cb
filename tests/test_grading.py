import math

import pytest
import torch

from kdagen import grading

BF16 = torch.bfloat16


def heads(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_state_error_is_relative_to_the_largest_element_of_its_head():
    expected = torch.zeros(2, 1, 2, 2, dtype=torch.float64)
    expected[0], expected[1] = 1000.0, 1.0
    actual = expected.float()
    actual[1, 0, 0, 0] += 1e-3
    assert grading.state_error(actual, expected) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_specials_must_agree(special):
    plain = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    odd = plain.clone()
    odd[0, 0, 0, 0] = special
    assert grading.state_error(odd.float(), plain) == math.inf
    assert grading.state_error(plain.float(), odd) == math.inf
    assert grading.state_error(odd.float(), odd) == 0.0
    assert grading.output_ulps(odd.to(BF16), plain) == math.inf


def test_output_ulps_count_from_the_rounded_oracle():
    expected = heads(1.0, 1.0 + 2.0**-7, 4.0)
    assert grading.output_ulps(expected.to(BF16), expected) == 0.0
    assert grading.output_ulps(heads(1.0 + 2.0**-7, 1.0 + 2.0**-7, 4.0).to(BF16), expected) == 1.0
    assert grading.output_ulps(heads(1.0, 1.0 + 2.0**-7, 4.0 + 3 * 2.0**-5).to(BF16), expected) == 3.0


def test_a_cancelled_output_counts_ulps_of_its_head():
    assert grading.output_ulps(heads(1024.0, 0.0).to(BF16), heads(1024.0, 2.0**-9)) < 1.0
    assert grading.output_ulps(heads(1024.0, 0.0).to(BF16), heads(1024.0, 1.0)) > 100


def test_truncation_is_misrounded():
    expected = torch.randn(4, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truncated = (expected.float().view(torch.int32) & -65536).view(torch.float32).to(BF16)
    assert grading.misrounded_share(expected.to(BF16), expected) == 0.0
    assert 0.4 < grading.misrounded_share(truncated, expected) < 0.6


def test_words_are_compared_by_their_bits():
    a = torch.tensor([0.0, -0.0, math.nan])
    assert grading.differing_words(a, a.clone()) == 0
    assert grading.differing_words(a, torch.tensor([0.0, 0.0, math.nan])) == 1


def pools():
    page = torch.zeros(4, 10)
    return {
        "state": page[:, :6].unflatten(1, (1, 2, 3)),
        "conv_state": page[:, 6:8],
        "out": torch.zeros(1, 2, 1, 2, dtype=BF16),
        "x": torch.ones(2, 2),
        "bound": -5.0,
    }


def test_the_named_slots_and_out_may_change():
    arguments = pools()
    snapshot = grading.Snapshot(arguments)
    arguments["state"][2] = 1.0
    arguments["conv_state"][2] = 1.0
    arguments["out"].fill_(1.0)
    assert snapshot.stray_bytes([2]) == 0
    assert snapshot.stray_bytes([1]) > 0


@pytest.mark.parametrize("where", ["another slot", "the gap of a page", "an input"])
def test_nothing_else_may_change(where):
    arguments = pools()
    snapshot = grading.Snapshot(arguments)
    if where == "another slot":
        arguments["conv_state"][1, 0] = 1.0
    elif where == "the gap of a page":
        arguments["state"].as_strided((40,), (1,))[29] = 1.0
    else:
        arguments["x"][0, 0] = 2.0
    assert snapshot.stray_bytes([2]) == 2  # two bytes of 1.0 and of 2.0 differ from 0.0 and 1.0
