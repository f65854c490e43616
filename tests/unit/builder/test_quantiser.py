"""Weight-only quantisation: shapes of scales, known numbers, the row that 4 bits do not take."""

import pytest
import torch

from mfs_trt.builder.quantiser import choose_block_size, quantise
from mfs_trt.errors import ConfigError

WEIGHT = torch.tensor([[0.5, -1.27, 0.01, 0.0], [0.0, 0.07, -0.04, 0.01]])


def test_int8_numbers_of_a_channel_reach_127():
    quantised = quantise(WEIGHT, "int8", torch.float32)
    assert quantised.values.tolist() == [[50, -127, 1, 0], [0, 127, -73, 18]]
    assert quantised.scale.tolist() == pytest.approx([0.01, 0.07 / 127])


def test_int4_numbers_of_a_block_reach_7():
    quantised = quantise(torch.cat([WEIGHT, 10 * WEIGHT[:, :2]], dim=1), "int4", torch.float32)
    assert quantised.scale.shape == (2, 3) and quantised.block_size == 2
    assert quantised.values.tolist() == [[3, -7, 7, 0, 3, -7], [0, 7, -7, 2, 0, 7]]


def test_fp8_numbers_of_a_channel_reach_448():
    quantised = quantise(WEIGHT, "fp8", torch.float32)
    assert quantised.values.dtype == torch.float8_e4m3fn
    assert quantised.values.float().abs().amax(dim=1).tolist() == [448, 448]


@pytest.mark.parametrize(("width", "size"), [(4096, 128), (13824, 128), (576, 64), (40, 8), (2, 2)])
def test_block_is_the_largest_power_of_two_that_fits(width, size):
    assert choose_block_size(width) == size


def test_int4_of_an_odd_row_is_refused():
    message = "int4 takes rows of an even length, got 33; int8 takes any"
    with pytest.raises(ConfigError, match=message):
        quantise(torch.ones(2, 33), "int4", torch.float16)
