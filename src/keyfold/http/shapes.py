"""What the type of a body or a query promises: no unknown field, no unbounded number, no open end."""

from collections.abc import Iterator

from msgspec import Struct, inspect

INT_MIN, INT_MAX = -(2**63), 2**64 - 1


def must_be_strict(kind: type[Struct], where: str) -> None:
    """Refuse, when a route is mounted, a type that would let through what the specification forbids."""
    for place, found in _walk(inspect.type_info(kind), "$"):
        if isinstance(found, inspect.StructType) and not found.forbid_unknown_fields:
            raise TypeError(f"{where}: {found.cls.__name__} at {place} must have forbid_unknown_fields=True")
        if isinstance(found, inspect.DataclassType | inspect.TypedDictType | inspect.NamedTupleType):
            raise TypeError(f"{where}: {place} must be a Struct, which can refuse unknown fields")
        if isinstance(found, inspect.IntType) and not _within_64_bits(found):
            raise TypeError(f"{where}: the integer at {place} needs ge and le within 64 bits")


def is_open(kind: type[Struct]) -> bool:
    """Whether the type takes JSON of any depth: through Any, through raw JSON, or by containing itself."""
    return any(isinstance(found, _OPEN) for _, found in _walk(inspect.type_info(kind), "$")) or _contains_itself(kind)


def float_names(kind: type[Struct]) -> list[str]:
    """The fields of a query that may be floats: text such as `nan` converts, and must be refused."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return [
        field.name
        for field in info.fields
        if any(isinstance(found, inspect.FloatType) for _, found in _walk(field.type, "$"))
    ]


_OPEN = (inspect.AnyType, inspect.RawType, inspect.CustomType, inspect.ExtType)


def _walk(info: inspect.Type, place: str, seen: frozenset[type] = frozenset()) -> Iterator[tuple[str, inspect.Type]]:
    """Every type within a type, with its place; one that contains itself is entered once."""
    if isinstance(info, inspect.Metadata):
        yield from _walk(info.type, place, seen)
        return
    yield place, info
    if isinstance(info, inspect.StructType):
        if info.cls not in seen:
            for field in info.fields:
                yield from _walk(field.type, f"{place}.{field.encode_name}", seen | {info.cls})
    elif isinstance(info, inspect.UnionType):
        for each in info.types:
            yield from _walk(each, place, seen)
    elif isinstance(info, inspect.DictType):
        yield from _walk(info.value_type, f"{place}[...]", seen)
    elif isinstance(info, inspect.TupleType):
        for each in info.item_types:
            yield from _walk(each, f"{place}[]", seen)
    elif isinstance(info, inspect.CollectionType):
        yield from _walk(info.item_type, f"{place}[]", seen)


def _contains_itself(kind: type[Struct]) -> bool:
    seen: list[type] = []
    for _, found in _walk(inspect.type_info(kind), "$"):
        if isinstance(found, inspect.StructType):
            seen.append(found.cls)
    return any(_within(each) for each in set(seen))


def _within(kind: type[Struct]) -> bool:
    """Whether a struct is reachable from its own fields."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return any(
        isinstance(found, inspect.StructType) and found.cls is kind
        for field in info.fields
        for _, found in _walk(field.type, "$")
    )


def _within_64_bits(info: inspect.IntType) -> bool:
    lowest = info.ge if info.ge is not None else info.gt
    highest = info.le if info.le is not None else info.lt
    return lowest is not None and highest is not None and lowest >= INT_MIN - 1 and highest <= INT_MAX + 1
