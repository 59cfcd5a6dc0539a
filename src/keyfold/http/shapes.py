"""What the type of a body or a query promises: no unknown field, no unbounded number, no open end."""

from collections.abc import Iterator

from msgspec import Struct, inspect

Found = tuple[str, inspect.Type, type | None]  # its place, what it is, the struct it is a field of


def must_be_strict(kind: type[Struct], where: str) -> None:
    """Refuse, when a route is mounted, a type that would let through what the specification forbids."""
    for place, found, owner in _walk(inspect.type_info(kind)):
        if isinstance(found, inspect.StructType) and not found.forbid_unknown_fields:
            raise TypeError(f"{where}: {found.cls.__name__} at {place} must have forbid_unknown_fields=True")
        if isinstance(found, inspect.DataclassType | inspect.TypedDictType | inspect.NamedTupleType):
            raise TypeError(f"{where}: {place} must be a Struct, which can refuse unknown fields")
        if isinstance(found, inspect.IntType) and not _is_bounded(found) and not hasattr(owner, "__post_init__"):
            # The bounds of msgspec end at 63 bits; an unsigned 64-bit number is checked by its struct.
            raise TypeError(f"{where}: the integer at {place} needs ge and le, or a __post_init__ that checks it")


def is_open(kind: type[Struct]) -> bool:
    """Whether the type takes JSON of any depth: through Any, through raw JSON, or by containing itself."""
    return any(isinstance(found, _OPEN) for _, found, _ in _walk(inspect.type_info(kind))) or _contains_itself(kind)


def float_names(kind: type[Struct]) -> list[str]:
    """The fields of a query that may be floats: text such as `nan` converts, and must be refused."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return [
        field.name
        for field in info.fields
        if any(isinstance(found, inspect.FloatType) for _, found, _ in _walk(field.type))
    ]


_OPEN = (inspect.AnyType, inspect.RawType, inspect.CustomType, inspect.ExtType)


def _walk(
    info: inspect.Type, place: str = "$", owner: type | None = None, seen: frozenset[type] = frozenset()
) -> Iterator[Found]:
    """Every type within a type; one that contains itself is entered once."""
    if isinstance(info, inspect.Metadata):
        yield from _walk(info.type, place, owner, seen)
        return
    yield place, info, owner
    if isinstance(info, inspect.StructType):
        if info.cls not in seen:
            for field in info.fields:
                yield from _walk(field.type, f"{place}.{field.encode_name}", info.cls, seen | {info.cls})
    elif isinstance(info, inspect.UnionType):
        for each in info.types:
            yield from _walk(each, place, owner, seen)
    elif isinstance(info, inspect.DictType):
        yield from _walk(info.value_type, f"{place}[...]", owner, seen)
    elif isinstance(info, inspect.TupleType):
        for each in info.item_types:
            yield from _walk(each, f"{place}[]", owner, seen)
    elif isinstance(info, inspect.CollectionType):
        yield from _walk(info.item_type, f"{place}[]", owner, seen)


def _contains_itself(kind: type[Struct]) -> bool:
    """Whether any struct within is reachable from its own fields."""
    structs = {found.cls for _, found, _ in _walk(inspect.type_info(kind)) if isinstance(found, inspect.StructType)}
    return any(each in _reachable(each) for each in structs)


def _reachable(kind: type[Struct]) -> set[type]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {
        found.cls for field in info.fields for _, found, _ in _walk(field.type) if isinstance(found, inspect.StructType)
    }


def _is_bounded(info: inspect.IntType) -> bool:
    return (info.ge is not None or info.gt is not None) and (info.le is not None or info.lt is not None)
