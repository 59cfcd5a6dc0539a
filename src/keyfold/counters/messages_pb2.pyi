from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CounterPack(_message.Message):
    __slots__ = ("counter_ids", "keys", "values")
    COUNTER_IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    counter_ids: _containers.RepeatedScalarFieldContainer[int]
    keys: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedCompositeFieldContainer[ValueType]
    def __init__(self, counter_ids: _Optional[_Iterable[int]] = ..., keys: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[_Union[ValueType, _Mapping]]] = ...) -> None: ...

class ValueType(_message.Message):
    __slots__ = ("float_values", "double_values", "fixed32_values", "fixed64_values")
    FLOAT_VALUES_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_VALUES_FIELD_NUMBER: _ClassVar[int]
    FIXED32_VALUES_FIELD_NUMBER: _ClassVar[int]
    FIXED64_VALUES_FIELD_NUMBER: _ClassVar[int]
    float_values: FloatValues
    double_values: DoubleValues
    fixed32_values: Fixed32Values
    fixed64_values: Fixed64Values
    def __init__(self, float_values: _Optional[_Union[FloatValues, _Mapping]] = ..., double_values: _Optional[_Union[DoubleValues, _Mapping]] = ..., fixed32_values: _Optional[_Union[Fixed32Values, _Mapping]] = ..., fixed64_values: _Optional[_Union[Fixed64Values, _Mapping]] = ...) -> None: ...

class FloatValues(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, value: _Optional[_Iterable[float]] = ...) -> None: ...

class DoubleValues(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, value: _Optional[_Iterable[float]] = ...) -> None: ...

class Fixed32Values(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, value: _Optional[_Iterable[int]] = ...) -> None: ...

class Fixed64Values(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, value: _Optional[_Iterable[int]] = ...) -> None: ...

class Counter(_message.Message):
    __slots__ = ("counter_id", "keys", "values")
    COUNTER_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    counter_id: int
    keys: _containers.RepeatedScalarFieldContainer[int]
    values: ValueType
    def __init__(self, counter_id: _Optional[int] = ..., keys: _Optional[_Iterable[int]] = ..., values: _Optional[_Union[ValueType, _Mapping]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("id", "evaluation_version")
    ID_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_VERSION_FIELD_NUMBER: _ClassVar[int]
    id: str
    evaluation_version: int
    def __init__(self, id: _Optional[str] = ..., evaluation_version: _Optional[int] = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("type", "id", "packed_counters", "counters", "segments", "version", "problem")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PACKED_COUNTERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    type: str
    id: str
    packed_counters: _containers.RepeatedCompositeFieldContainer[CounterPack]
    counters: _containers.RepeatedCompositeFieldContainer[Counter]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    version: int
    problem: str
    def __init__(self, type: _Optional[str] = ..., id: _Optional[str] = ..., packed_counters: _Optional[_Iterable[_Union[CounterPack, _Mapping]]] = ..., counters: _Optional[_Iterable[_Union[Counter, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., version: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class LeftOut(_message.Message):
    __slots__ = ("counter_id", "reason")
    COUNTER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    counter_id: int
    reason: str
    def __init__(self, counter_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Profiles(_message.Message):
    __slots__ = ("profiles", "left_out")
    PROFILES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    profiles: _containers.RepeatedCompositeFieldContainer[Profile]
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOut]
    def __init__(self, profiles: _Optional[_Iterable[_Union[Profile, _Mapping]]] = ..., left_out: _Optional[_Iterable[_Union[LeftOut, _Mapping]]] = ...) -> None: ...
