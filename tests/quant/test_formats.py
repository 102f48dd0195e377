"""The parsers against writers made from the formats' definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quant_writers as writers
from pelton.errors import CheckpointError
from pelton.quant import awq, compressed_tensors, gptq
from pelton.quant.canonical import QuantizedWeight, Scheme, pack_words, unpack_words


def parse(parser: Any, scheme: Scheme, tensors: dict[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
    """What the engine does: the tensors have the shapes that the parser says, and their values pass its check."""
    specs = parser.specs(scheme, n, k, "layer")
    assert set(tensors) <= set(specs)
    assert set(specs) - set(tensors) <= set(parser.optional(scheme))
    for suffix, tensor in tensors.items():
        assert tuple(tensor.shape) == specs[suffix].shape, suffix
        assert tensor.dtype in specs[suffix].dtypes, suffix
        if specs[suffix].early:
            parser.check(scheme, suffix, tensor, specs[suffix], suffix)
    return parser.parse(scheme, tensors, torch.empty(n, k, dtype=torch.uint8))


def same(found: QuantizedWeight, expected: writers.Quantized) -> None:
    np.testing.assert_array_equal(found.q.numpy(), expected.q)
    usual = torch.full(found.scales.shape, 1 << (found.bits - 1), dtype=torch.uint8)
    np.testing.assert_array_equal((usual if found.zeros is None else found.zeros).numpy(), expected.zeros)
    assert torch.equal(found.scales, expected.scales)
    np.testing.assert_array_equal(found.groups().numpy(), expected.g_idx)
    assert found.bits == expected.bits
    torch.testing.assert_close(found.dequantize(torch.float64), expected.dequantized(), rtol=0, atol=0)


# K in units of 8 and groups that do not divide it: the last one is short
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 13)).map(lambda t: (8 * t[0], 8 * t[1]))
GROUPS = st.sampled_from([-1, 16, 32, 64, 128])
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
COMMON = {"symmetric": st.booleans(), "dtype": DTYPES, "seed": st.integers(0, 1000)}


@settings(max_examples=60, deadline=None)
@given(
    SIZES, st.sampled_from([4, 8]), GROUPS, st.sampled_from(["none", "equal", "any"]), st.integers(1, 2),
    st.fixed_dictionaries(COMMON),
)  # fmt: skip
def test_gptq(
    size: tuple[int, int], bits: int, group_size: int, order: str, version: int, options: Any
) -> None:
    n, k = size
    weight = writers.quantized(n, k, bits=bits, group_size=group_size, order=order, **options)
    scheme = Scheme(
        "gptq", bits, group_size, options["symmetric"], "none" if order == "none" else "equal", version == 1
    )
    found = parse(gptq, scheme, writers.gptq(weight, version), n, k)
    if order != "none" and not weight.g_idx.any() and found.g_idx is None:
        return  # a mapping of zeros alone
    same(found, weight)
    assert (found.zeros is None) == bool((weight.zeros == 1 << (bits - 1)).all())
    assert found.order in ({"none", order} if order != "any" else {"none", "equal", "any"})


@settings(max_examples=40, deadline=None)
@given(SIZES, GROUPS, st.fixed_dictionaries(COMMON))
def test_awq(size: tuple[int, int], group_size: int, options: Any) -> None:
    n, k = size
    weight = writers.quantized(n, k, group_size=group_size, **options)
    same(parse(awq, Scheme("awq", 4, group_size, False), writers.awq(weight), n, k), weight)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 90)), st.sampled_from([4, 8]), GROUPS, st.booleans(),
    st.fixed_dictionaries(COMMON),
)  # fmt: skip
def test_compressed_tensors(
    size: tuple[int, int], bits: int, group_size: int, order: bool, options: Any
) -> None:
    n, k = size  # any: rows are padded to whole words
    weight = writers.quantized(
        n, k, bits=bits, group_size=group_size, order="equal" if order else "none", **options
    )
    scheme = Scheme(
        "compressed-tensors", bits, group_size, options["symmetric"], "equal" if order else "none"
    )
    tensors = writers.compressed(weight, options["symmetric"], order)
    same(parse(compressed_tensors, scheme, tensors, n, k), weight)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([4, 8]), st.integers(0, 1000))
def test_words(rows: int, words: int, bits: int, seed: int) -> None:
    fields = np.random.default_rng(seed).integers(0, 1 << bits, (rows, words * 32 // bits))
    packed = pack_words(torch.from_numpy(fields.astype(np.uint8)), bits)
    assert torch.equal(packed, writers.int32(writers.pack(fields, bits)))
    np.testing.assert_array_equal(unpack_words(packed, bits).numpy(), fields)


def test_gptq_zero_points_of_0_borrow_from_their_neighbours() -> None:
    """Adding one to each field would make 16 of the first and leave the others one too low."""
    weight = writers.quantized(8, 32, seed=1)
    weight.zeros[0] = [0, 0, 5, 0, 15, 0, 1, 8]
    tensors = writers.gptq(weight)
    assert f"{int(tensors['qzeros'][0, 0]) & 0xFFFFFFFF:08x}" == "6ffdf3ef"
    same(parse(gptq, Scheme("gptq", 4, 32, False, zeros_less_one=True), tensors, 8, 32), weight)


def test_gptq_without_order_takes_a_mapping_of_zeros_as_none() -> None:
    weight = writers.quantized(8, 96, seed=2)
    tensors = writers.gptq(weight) | {"g_idx": torch.zeros(96, dtype=torch.int32)}
    same(parse(gptq, Scheme("gptq", 4, 32, False, zeros_less_one=True), tensors, 8, 96), weight)
    del tensors["g_idx"]  # not all writers have one
    same(parse(gptq, Scheme("gptq", 4, 32, False, zeros_less_one=True), tensors, 8, 96), weight)


def test_576_inputs_in_groups_of_128_are_five_groups() -> None:
    assert Scheme("gptq", 4, 128, True).groups(576) == 5
    specs = gptq.specs(Scheme("gptq", 4, 128, True), 64, 576, "layer")
    assert {name: spec.shape for name, spec in specs.items()} == {
        "qweight": (72, 64),
        "qzeros": (5, 8),
        "scales": (5, 64),
        "g_idx": (576,),
    }


@pytest.mark.parametrize(
    ("parser", "scheme", "n", "k", "message"),
    [
        (gptq, Scheme("gptq", 4, 32, True), 12, 64, "outputs in multiples of 8, the config asks for 12"),
        (gptq, Scheme("gptq", 4, 32, True), 16, 60, "inputs in multiples of 8, the config asks for 60"),
        (gptq, Scheme("gptq", 8, 32, True), 16, 62, "inputs in multiples of 4, the config asks for 62"),
        (awq, Scheme("awq", 4, 32, True), 12, 64, "outputs in multiples of 8, the config asks for 12"),
    ],
)
def test_sizes_that_cannot_be_packed(parser: Any, scheme: Scheme, n: int, k: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"layer: .*{message}"):
        parser.specs(scheme, n, k, "layer")


@pytest.mark.parametrize(
    ("parser", "suffix", "format_"),
    [
        (gptq, "scales", "gptq"),
        (awq, "scales", "awq"),
        (compressed_tensors, "weight_scale", "compressed-tensors"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers(parser: Any, suffix: str, format_: str, value: float) -> None:
    scheme = Scheme(format_, 4, 32, True)
    spec = parser.specs(scheme, 16, 64, "layer")[suffix]
    scales = torch.ones(spec.shape, dtype=torch.bfloat16)
    parser.check(scheme, suffix, scales, spec, "file: 'x'")
    scales[1, 1] = value
    with pytest.raises(CheckpointError, match="file: 'x': 1 of 32 scales are NaN or infinite"):
        parser.check(scheme, suffix, scales, spec, "file: 'x'")


@pytest.mark.parametrize(("parser", "suffix"), [(gptq, "g_idx"), (compressed_tensors, "weight_g_idx")])
@pytest.mark.parametrize(("value", "found"), [(-1, "-1 to 1"), (2, "0 to 2")])
def test_groups_that_do_not_exist(parser: Any, suffix: str, value: int, found: str) -> None:
    scheme = Scheme("gptq", 4, 32, True, "equal")
    spec = parser.specs(scheme, 16, 64, "layer")[suffix]
    groups = torch.arange(64, dtype=torch.int32) // 32
    parser.check(scheme, suffix, groups, spec, "file: 'x'")
    groups[7] = value
    with pytest.raises(CheckpointError, match=f"file: 'x': group indices from {found}, expected 0 to 1"):
        parser.check(scheme, suffix, groups, spec, "file: 'x'")
