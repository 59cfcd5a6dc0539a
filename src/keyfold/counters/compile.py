"""A catalog from a `.proto` file whose enum values carry `CounterDescription`, or from its compiled descriptor set."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import Descriptor, EnumDescriptor, EnumValueDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message

from keyfold.counters.catalog import VALUE_FUNCTIONS, Catalog, Counter, mistakes
from keyfold.counters.errors import CatalogWrong
from keyfold.counters.protoc import Compiled, compiled

EXAMPLE = Path(__file__).with_name("examples") / "marketplace.proto"
OPTION = "CounterDescription"
NAMESPACES = "EngineNamespace"
NO_COUNTER = 0  # the id that no counter has: stands for a TimeCounterId that names none

# What each field of a description must be, whatever its catalog declares it as; an enum is read as its name.
TEXT, NUMBER, WHOLE, FLAG = (str,), (int, float), (int,), (bool,)
FIELDS: dict[str, tuple[type, ...]] = {
    "EngineNamespace": TEXT,
    "SecondaryEngineNamespace": TEXT,
    "ValueFunction": TEXT,
    "IdFunction": TEXT,
    "DecayFactor": NUMBER,
    "TimeCounterId": (str, int),
    "InputTypes": (list,),
    "Description": TEXT,
    "UsageRestriction": TEXT,
    "ProfileType": TEXT,
    "NoOperation": FLAG,
    "NotGlued": FLAG,
    "Idf": FLAG,
    "CleanUpSettings": (dict,),
}
# Names that the compiler does not know, and that the checks of the catalog report themselves.
JUDGED = {"EngineNamespace", "SecondaryEngineNamespace", "ValueFunction", "IdFunction", "TimeCounterId"}
LIMITS: dict[str, tuple[type, ...]] = {"MaxRecords": WHOLE, "ExpireDays": WHOLE, "MaxDelayedRecords": WHOLE}


def load(path: str | Path) -> Catalog:
    """Compile and check a catalog. Every mistake is reported, by name, in one error."""
    path = Path(path)
    source = _compiled(path)
    if source.descriptors is None:
        unknown = [f"{name}: {wrong}" for name, given in source.unknown.items() for wrong in _unknown(given)]
        raise CatalogWrong([*source.mistakes, *unknown], place=str(path))
    files = _files(source.descriptors, path)
    enums = [enum for file in files for enum in _enums(file)]
    described = [(value, given) for enum in enums for value, given in _described(enum)]
    if not described:
        raise CatalogWrong([f"no enum value carries the option {OPTION}"], place=str(path))
    ids = {value.name: value.number for value, _ in described}
    times = {given.get("TimeCounterId") for _, given in described if given}
    found, counters, unreadable = list(source.mistakes), [], {NO_COUNTER}
    for value, given in described:
        names = source.unknown.get(value.name, {})
        counter, wrong = _counter(value, given, names, ids, times)
        if value.name in source.unreadable:
            counter, wrong = None, list(_unknown(names))  # the rest is reported as the compiler put it
        found += [f"{value.name}: {mistake}" for mistake in wrong]
        if counter is None:
            unreadable.add(value.number)
        else:
            counters.append(counter)
    # A catalog that writes its namespaces as text has no enum of them, and any will do.
    namespaces = [value.name for enum in enums if enum.name == NAMESPACES for value in enum.values] or None
    found += mistakes(counters, namespaces, unreadable)
    if found:
        raise CatalogWrong(found, place=str(path))
    return Catalog(counters, namespaces=namespaces)


def _compiled(path: Path) -> Compiled:
    if not path.is_file():
        raise CatalogWrong([f"{path} is not a plain file" if path.exists() else f"there is no file {path}"])
    return compiled(path) if path.suffix == ".proto" else Compiled(path.read_bytes(), [], {}, set())


def _files(descriptors: bytes, path: Path) -> list[FileDescriptor]:
    pool = DescriptorPool()
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(descriptors).file
        # Not looked up by name: the pool does not find those with other letters than ASCII.
        return [pool.AddSerializedFile(file.SerializeToString()) for file in files]
    except DecodeError:
        raise CatalogWrong(["neither a .proto file nor a compiled descriptor set"], place=str(path)) from None
    except (TypeError, KeyError):
        wrong = "the descriptor set lacks files that it imports: make it with --include_imports"
        raise CatalogWrong([wrong], place=str(path)) from None


def _enums(scope: FileDescriptor | Descriptor) -> Iterator[EnumDescriptor]:
    """Every enum, those inside messages too."""
    if isinstance(scope, Descriptor):
        inner, enums = scope.nested_types, scope.enum_types
    else:
        inner, enums = list(scope.message_types_by_name.values()), list(scope.enum_types_by_name.values())
    yield from enums
    for message in inner:
        yield from _enums(message)


def _described(enum: EnumDescriptor) -> list[tuple[EnumValueDescriptor, dict[str, Any] | None]]:
    """The values of an enum that is a catalog, or a piece of one: some value carries the option.

    Aliases (a number used twice) are among the values, to be reported. The first value of proto3, 0, need not be a
    counter.
    """
    read = [(value, _description(value)) for value in enum.values]
    if all(given is None for _, given in read):
        return []
    return [(value, given) for value, given in read if given is not None or value.number != 0]


def _description(value: EnumValueDescriptor) -> dict[str, Any] | None:
    # The options know our extension only as a message of the pool that the catalog is in.
    pool = value.type.file.pool
    if not value.has_options:
        return None
    try:
        known = pool.FindMessageTypeByName("google.protobuf.EnumValueOptions")
    except KeyError:  # nothing imports the options, so nothing extends them
        return None
    options = message_factory.GetMessageClass(known)
    fields = options.FromString(value.GetOptions().SerializeToString()).ListFields()
    found = next((found for field, found in fields if field.name == OPTION), None)
    if found is not None and not isinstance(found, Message):
        raise CatalogWrong([f"{value.name}: {OPTION} must be declared as one message"])
    return _fields(found) if found is not None else None


def _fields(message: Message) -> dict[str, Any]:
    """The fields that were given; an enum by the name of its value, so that catalogs may also write it as text."""
    return {field.name: _plain(field, found) for field, found in message.ListFields()}


def _plain(field: FieldDescriptor, found: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(found)
    return [_one(field, each) for each in found] if field.is_repeated else _one(field, found)


def _one(field: FieldDescriptor, found: Any) -> Any:
    if field.message_type is not None:
        return _fields(found)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(found)
        return named.name if named else str(found)
    return found


def _counter(
    value: EnumValueDescriptor,
    given: dict[str, Any] | None,
    unknown: dict[str, str],
    ids: dict[str, int],
    times: Collection[str | int | None],
) -> tuple[Counter | None, list[str]]:
    """The counter as far as it can be read, and what is wrong with its description."""
    if given is None:
        return None, [f"no {OPTION}"]
    given = {**given, **unknown}
    clean_up = given.get("CleanUpSettings", {})
    wrong = [*_wrong_types(given, FIELDS), *(_wrong_types(clean_up, LIMITS) if isinstance(clean_up, dict) else ())]
    if wrong:
        return None, [*wrong, *_unknown(unknown)]
    wrong += _unknown({field: name for field, name in unknown.items() if field not in JUDGED})
    function, time = given.get("ValueFunction"), given.get("TimeCounterId")
    if function not in VALUE_FUNCTIONS:
        wrong.append(f"ValueFunction is {function or 'missing'}, and must be one of {', '.join(VALUE_FUNCTIONS)}")
        # Taken for what others use it as, so that nothing else is blamed for this.
        function = "VF_AGE" if value.name in times or value.number in times else "VF_FLOAT"
    if isinstance(time, str):
        if time not in ids:
            wrong.append(f"TimeCounterId {time} is unknown")
        time = ids.get(time, NO_COUNTER)
    if "EngineNamespace" not in given:
        wrong.append("EngineNamespace is missing")
        return None, wrong
    counter = Counter(
        id=value.number,
        name=value.name,
        kind=VALUE_FUNCTIONS[function],
        namespace=given["EngineNamespace"],
        secondary_namespace=given.get("SecondaryEngineNamespace"),
        id_function=given.get("IdFunction", "IF_ID"),
        decay=float(given.get("DecayFactor", 0.0)),
        time_counter_id=time,
        input_types=tuple(given.get("InputTypes", ())),
        description=given.get("Description", ""),
        restriction=given.get("UsageRestriction"),
        profile_type=given.get("ProfileType", "PT_USER").removeprefix("PT_").lower(),
        no_operation=given.get("NoOperation", False),
        not_glued=given.get("NotGlued", False),
        idf=given.get("Idf", False),
        records_max=clean_up.get("MaxRecords"),
        expire_days=clean_up.get("ExpireDays"),
        delayed_records_max=clean_up.get("MaxDelayedRecords"),
    )
    return counter, wrong


def _wrong_types(given: dict[str, Any], kinds: dict[str, tuple[type, ...]]) -> Iterable[str]:
    for field, found in given.items():
        if field in kinds and not (isinstance(found, kinds[field]) and _are_text(found)):
            yield f"{field} cannot be {found!r}"


def _are_text(found: Any) -> bool:
    """Whether the elements of a list are text, as all lists of a description are."""
    return not isinstance(found, list) or all(isinstance(each, str) for each in found)


def _unknown(given: dict[str, str]) -> Iterable[str]:
    return (f"unknown {field} {name}" for field, name in given.items())
