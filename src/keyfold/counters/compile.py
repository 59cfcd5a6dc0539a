"""A catalog from a `.proto` file whose enum values carry `CounterDescription`, or from its compiled descriptor set."""

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import EnumValueDescriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from keyfold.counters.catalog import ID_FUNCTIONS, VALUE_FUNCTIONS, Catalog, Counter, mistakes
from keyfold.counters.errors import CatalogWrong

OPTION = "CounterDescription"
COMPILE_SECONDS_MAX = 60


def load(path: str | Path) -> Catalog:
    """Compile and check a catalog. Every mistake is reported, by name, in one error."""
    path = Path(path)
    files = _descriptors(path)
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    values = list(_described(files, pool))
    if not values:
        raise CatalogWrong([f"no enum value carries the option {OPTION}"], place=str(path))
    options = message_factory.GetMessageClass(pool.FindMessageTypeByName("google.protobuf.EnumValueOptions"))
    names = {value.number: value.name for value in values}
    read = [_read(value, options.FromString(value.GetOptions().SerializeToString()), pool, names) for value in values]
    counters = [counter for counter, _ in read if counter is not None]
    found = [mistake for _, wrong in read for mistake in wrong]
    found += mistakes(counters, namespaces := _namespaces(files))
    if found:
        raise CatalogWrong(found, place=str(path))
    return Catalog(counters, namespaces=namespaces)


def _descriptors(path: Path) -> descriptor_pb2.FileDescriptorSet:
    if not path.is_file():
        raise CatalogWrong([f"there is no file {path}"])
    raw = path.read_bytes() if path.suffix != ".proto" else _compiled(path)
    try:
        return descriptor_pb2.FileDescriptorSet.FromString(raw)
    except DecodeError:
        raise CatalogWrong(["neither a .proto file nor a compiled descriptor set"], place=str(path)) from None


def _compiled(path: Path) -> bytes:
    """In a process of its own: the compiler writes its complaints to the standard error of the process."""
    with tempfile.TemporaryDirectory(prefix="keyfold-catalog-") as folder:
        out = Path(folder, "catalog.binpb")
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{path.parent}", "--include_imports"]
        done = subprocess.run(  # noqa: S603
            [*command, f"--descriptor_set_out={out}", path.name],
            capture_output=True,
            text=True,
            timeout=COMPILE_SECONDS_MAX,
            check=False,
        )
        if done.returncode != 0 or not out.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise CatalogWrong(lines or ["the compiler failed without a word"], place=str(path))
        return out.read_bytes()


def _described(
    files: descriptor_pb2.FileDescriptorSet, pool: descriptor_pool.DescriptorPool
) -> Iterable[EnumValueDescriptor]:
    """The values of the enum that is the catalog: the one whose values carry the option."""
    for file in files.file:
        for enum in file.enum_type:
            if any(value.HasField("options") for value in enum.value):
                full = f"{file.package}.{enum.name}" if file.package else enum.name
                # The descriptor lists an alias (a number used twice) as well, so that it can be reported.
                yield from pool.FindEnumTypeByName(full).values


def _namespaces(files: descriptor_pb2.FileDescriptorSet) -> list[str]:
    return [
        value.name
        for file in files.file
        for enum in file.enum_type
        if enum.name == "EngineNamespace"
        for value in enum.value
    ]


def _read(
    value: EnumValueDescriptor, options: Message, pool: descriptor_pool.DescriptorPool, names: dict[int, str]
) -> tuple[Counter | None, list[str]]:
    given = next((_fields(found) for field, found in options.ListFields() if field.name == OPTION), None)
    if given is None:
        if value.number == 0:  # the first value that proto3 asks for
            return None, []
        return None, [f"{value.name}: no {OPTION}"]
    return _counter(value, given, names)


def _fields(message: Message) -> dict[str, Any]:
    """The fields that were given; an enum by the name of its value, so that catalogs may also write it as text."""
    return {field.name: _plain(field, found) for field, found in message.ListFields()}


def _plain(field: FieldDescriptor, found: Any) -> Any:
    if field.message_type is not None:
        return _fields(found)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[found].name
    return list(found) if field.is_repeated else found


def _counter(
    value: EnumValueDescriptor, given: dict[str, Any], names: dict[int, str]
) -> tuple[Counter | None, list[str]]:
    wrong: list[str] = []
    function = given.get("ValueFunction")
    if function not in VALUE_FUNCTIONS:
        wrong.append(f"ValueFunction {function} is none of {', '.join(VALUE_FUNCTIONS)}")
    id_function = given.get("IdFunction", "IF_ID")
    if id_function not in ID_FUNCTIONS:
        wrong.append(f"IdFunction {id_function} is none of {', '.join(ID_FUNCTIONS)}")
    if "EngineNamespace" not in given:
        wrong.append("EngineNamespace is missing")
    time_id = _time_id(given.get("TimeCounterId"), names)
    if time_id == -1:
        wrong.append(f"TimeCounterId {given['TimeCounterId']} is unknown")
        time_id = None
    if wrong:
        return None, [f"{value.name}: {mistake}" for mistake in wrong]
    clean_up = given.get("CleanUpSettings", {})
    counter = Counter(
        id=value.number,
        name=value.name,
        kind=VALUE_FUNCTIONS[given["ValueFunction"]],
        namespace=given["EngineNamespace"],
        secondary_namespace=given.get("SecondaryEngineNamespace"),
        id_function=id_function,
        decay=float(given.get("DecayFactor", 0.0)),
        time_counter_id=time_id,
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
    return counter, []


def _time_id(given: str | int | None, names: dict[int, str]) -> int | None:
    """By the name of the enum value (or its number, where a catalog declares the field as one); -1: unknown."""
    if given is None or isinstance(given, int):
        return given
    return next((number for number, name in names.items() if name == given), -1)
