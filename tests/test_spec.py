import pytest

from kdagen.errors import SpecError
from kdagen.spec import INSTANCES, DType, KernelSpec


def test_the_name_carries_the_head_count_and_elides_defaults():
    assert KernelSpec(12).name == "kda_decode_h12"


def test_a_slice_is_64_kib():
    assert KernelSpec(1).state_bytes == 64 * 1024


def test_every_combination_of_what_a_layer_can_ask_for_is_an_instance():
    assert len({instance.name for instance in INSTANCES}) == len(INSTANCES) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "num_heads: expected an int from 1 to 1024, got 0"),
        ({"num_heads": 1025}, "num_heads: expected an int from 1 to 1024, got 1025"),
        ({"num_heads": "12"}, "num_heads: expected an int from 1 to 1024, got '12'"),
        ({"num_heads": 12, "head_dim": 64}, "head_dim: expected 128, the only one supported, got 64"),
        ({"num_heads": 12, "conv_width": 3}, "conv_width: expected 4, the only one supported, got 3"),
        ({"num_heads": 12, "state_dtype": DType.BF16}, "state_dtype: expected fp32, the only one supported, got bf16"),
    ],
)
def test_an_impossible_spec_is_refused(arguments, message):
    with pytest.raises(SpecError) as raised:
        KernelSpec(**arguments)
    assert str(raised.value) == message
