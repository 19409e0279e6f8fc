"""Names of shapes and lists of batch sizes."""

import pytest

from billfish.bench.shapes import SETS, parse_rows, parse_shapes
from billfish.errors import UserError


def sizes(name):
    return [(linear.name, linear.k, linear.n) for linear in SETS[name].linears]


def test_the_sets_are_the_models_as_served():
    assert sizes("llama3-8b") == [
        ("qkv", 4096, 6144),
        ("o", 4096, 4096),
        ("gate_up", 4096, 28672),
        ("down", 14336, 4096),
    ]
    assert [size[1:] for size in sizes("llama3-70b")] == [
        (8192, 10240),
        (8192, 8192),
        (8192, 57344),
        (28672, 8192),
    ]
    assert [size[1:] for size in sizes("qwen2.5-7b")] == [
        (3584, 4608),
        (3584, 3584),
        (3584, 37888),
        (18944, 3584),
    ]
    assert [size[1:] for size in sizes("smollm2-135m")] == [
        (576, 960),
        (576, 576),
        (576, 3072),
        (1536, 576),
    ]
    assert sizes("llama2-7b")[0] == ("qkv", 4096, 12288)
    assert sizes("mistral-7b") == sizes("llama3-8b")
    assert sizes("qwen3-8b")[2:] == [("gate_up", 4096, 24576), ("down", 12288, 4096)]


def test_shapes_are_names_or_k_by_n():
    layer, literal = parse_shapes("llama3-8b, 128x64,llama3-8b")
    assert layer is SETS["llama3-8b"] and layer.is_layer
    assert (literal.linears[0].k, literal.linears[0].n) == (128, 64) and not literal.is_layer
    assert layer.label(layer.linears[0]) == "llama3-8b qkv"
    assert literal.label(literal.linears[0]) == "128x64"


@pytest.mark.parametrize("text", ["llama4-8b", "4096x", "", "llama3-8b;4096x4096", "-1x4"])
def test_unknown_shapes_list_the_known_ones(text):
    with pytest.raises(UserError, match=r"llama2-7b.*smollm2-135m"):
        parse_shapes(text)


def test_an_empty_linear_is_refused():
    with pytest.raises(UserError, match="1 or more"):
        parse_shapes("0x4096")


def test_rows_are_numbers_and_ranges():
    assert parse_rows("16,1-4, 2") == (1, 2, 3, 4, 16)
    assert parse_rows("7-7") == (7,)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0", "1 row or more"),
        ("-3", "1 row or more"),
        ("4,0-2", "1 row or more"),
        ("one", "such as"),
        ("1.5", "such as"),
        ("1-2-3", "such as"),
        (",", "none given"),
        ("8-4", "did you mean 4-8"),
    ],
)
def test_bad_rows_are_explained(text, told):
    with pytest.raises(UserError, match=told):
        parse_rows(text)
