"""Of a type it is known beforehand whether it takes JSON of any depth, and whether it could let something through."""

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta, Struct

from keyfold.http.shapes import float_names, is_open, must_be_strict

pytestmark = pytest.mark.spec("CORE-14")

Small = Annotated[int, Meta(ge=0, le=10)]


class Leaf(Struct, forbid_unknown_fields=True):
    number: Small = 0


class Closed(Struct, forbid_unknown_fields=True):
    leaves: list[Leaf]
    named: dict[str, Leaf]
    pair: tuple[Leaf, str]
    maybe: Leaf | None = None


class Tree(Struct, forbid_unknown_fields=True):
    children: list["Tree"]


class Garden(Struct, forbid_unknown_fields=True):
    tree: Tree


class WithAny(Struct, forbid_unknown_fields=True):
    leaf: Leaf
    rest: dict[str, Any]


class WithRaw(Struct, forbid_unknown_fields=True):
    rest: msgspec.Raw


@pytest.mark.parametrize("kind", [Tree, Garden, WithAny, WithRaw])
def test_a_type_with_an_open_end_is_open(kind: type[Struct]) -> None:
    assert is_open(kind)


@pytest.mark.parametrize("kind", [Leaf, Closed])
def test_a_type_of_known_depth_is_closed(kind: type[Struct]) -> None:
    assert not is_open(kind)


@pytest.mark.parametrize("kind", [Leaf, Closed, Tree, Garden, WithAny])
def test_strict_types_are_taken(kind: type[Struct]) -> None:
    must_be_strict(kind, "here")


def test_a_loose_type_is_found_however_deep() -> None:
    class Loose(Struct):
        name: str

    class Outer(Struct, forbid_unknown_fields=True):
        by_name: dict[str, tuple[Loose | None, ...]]

    with pytest.raises(TypeError, match=r"here: Loose at \$\.by_name\[\.\.\.\]\[\] must have forbid_unknown_fields"):
        must_be_strict(Outer, "here")


def test_an_integer_that_could_leave_64_bits_is_found() -> None:
    class Half(Struct, forbid_unknown_fields=True):
        number: Annotated[int, Meta(ge=0)]

    with pytest.raises(TypeError, match=r"\$\.number needs ge and le"):
        must_be_strict(Half, "here")


def test_a_struct_may_check_an_unsigned_number_itself() -> None:
    class Unsigned(Struct, forbid_unknown_fields=True):
        number: int

        def __post_init__(self) -> None:
            if not 0 <= self.number < 2**64:
                raise ValueError("an unsigned 64-bit number is needed")

    must_be_strict(Unsigned, "here")


def test_the_floats_of_a_query_are_known() -> None:
    class Query(Struct, forbid_unknown_fields=True):
        a: float
        b: float | None = None
        c: str = ""

    assert float_names(Query) == ["a", "b"]
