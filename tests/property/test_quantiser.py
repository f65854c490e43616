"""Laws of weight-only quantisation, for any matrix: how far a stored number is from its weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_trt.builder.quantiser import choose_block_size, pack_int4, quantise

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
FORMATS = ("int8", "int4", "fp8")


@st.composite
def matrices(draw, even: bool):
    """Rows of every magnitude that float16 has, some of them zero, some with one large weight."""
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 70))
    width += even and width % 2
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    exponents = [draw(st.integers(-24, 14)) for _ in range(rows)]
    weight = torch.randn(rows, width, generator=generator)
    weight *= torch.tensor(exponents).double().exp2()[:, None].float()
    for row in range(rows):
        kind = draw(st.sampled_from(["plain", "plain", "zero", "outlier"]))
        if kind == "zero":
            weight[row] = 0
        if kind == "outlier":
            weight[row, draw(st.integers(0, width - 1))] *= 100
    return weight.clamp(-60000, 60000)


def by_hand(quantised):
    """[out, in] float64 products, and the scale of each; the slow twin of `dequantised`."""
    values, scale = quantised.values.double(), quantised.scale.double()
    scales = torch.empty_like(values)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            is_blocked = scale.dim() == 2
            scales[row, column] = (
                scale[row, column // quantised.block_size] if is_blocked else scale[row]
            )
    return values * scales, scales


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=DTYPES)
def test_no_weight_is_further_than_half_a_scale_from_its_number(weight_format, data, dtype):
    weight = data.draw(matrices(even=weight_format == "int4"))
    quantised = quantise(weight, weight_format, dtype)
    products, scales = by_hand(quantised)
    slack = 1 + 1e-6  # of the division in fp32
    assert ((weight.double() - products).abs() <= scales / 2 * slack).all()


@settings(max_examples=60, deadline=None)
@given(weight=matrices(even=False), dtype=DTYPES)
def test_fp8_numbers_are_within_half_a_step_of_their_format(weight, dtype):
    products, scales = by_hand(quantise(weight, "fp8", dtype))
    bound = torch.maximum(weight.double().abs() * 2**-4, scales * 2**-10)
    assert ((weight.double() - products).abs() <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("weight_format", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=DTYPES)
def test_scales_are_above_zero_and_dequantising_is_the_product(weight_format, data, dtype):
    weight = data.draw(matrices(even=weight_format == "int4"))
    quantised = quantise(weight, weight_format, dtype)
    assert quantised.scale.dtype == dtype and (quantised.scale > 0).all()
    assert quantised.values.shape == weight.shape
    products, _ = by_hand(quantised)
    assert torch.equal(quantised.dequantised(), products.to(dtype))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_channels_of_zeros_stay_zero(weight_format):
    weight = torch.zeros(3, 8)
    weight[1] = torch.arange(8)
    quantised = quantise(weight, weight_format, torch.float16)
    assert not quantised.dequantised()[[0, 2]].any()
    assert quantised.scale[0].unique().tolist() == [1.0]


@settings(max_examples=40, deadline=None)
@given(weight=matrices(even=True))
def test_scales_do_not_reach_over_their_channel_or_block(weight):
    """A large weight changes nothing outside its own."""
    other = weight.clone()
    other[0, 0] = 60000
    for weight_format in FORMATS:
        before, after = (quantise(w, weight_format, torch.float32) for w in (weight, other))
        reach = before.block_size
        assert torch.equal(before.values[1:].float(), after.values[1:].float())
        assert torch.equal(before.values[0, reach:].float(), after.values[0, reach:].float())


@given(width=st.integers(1, 400).map(lambda n: 2 * n))
def test_blocks_divide_a_row(width):
    block_size = choose_block_size(width)
    assert width % block_size == 0 and 2 <= block_size <= 128
    assert width % (2 * block_size) or block_size == 128


@given(values=st.lists(st.integers(-8, 7), min_size=1, max_size=60).map(lambda v: v + v))
def test_packed_numbers_are_read_low_four_bits_first(values):
    packed = pack_int4(torch.tensor(values, dtype=torch.int8))
    nibbles = [n for byte in packed.tolist() for n in (byte & 15, byte >> 4)]
    assert [n - 16 if n > 7 else n for n in nibbles] == values
