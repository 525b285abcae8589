from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Attempt(_message.Message):
    __slots__ = ("rollout_id", "attempt", "calls_expected")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CALLS_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    attempt: int
    calls_expected: int
    def __init__(self, rollout_id: _Optional[str] = ..., attempt: _Optional[int] = ..., calls_expected: _Optional[int] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("attempts", "timeout_s")
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    timeout_s: float
    def __init__(self, attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class SealResponse(_message.Message):
    __slots__ = ("sealed", "incomplete")
    SEALED_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    sealed: _containers.RepeatedCompositeFieldContainer[SealedAttempt]
    incomplete: _containers.RepeatedCompositeFieldContainer[IncompleteAttempt]
    def __init__(self, sealed: _Optional[_Iterable[_Union[SealedAttempt, _Mapping]]] = ..., incomplete: _Optional[_Iterable[_Union[IncompleteAttempt, _Mapping]]] = ...) -> None: ...

class SealedAttempt(_message.Message):
    __slots__ = ("rollout_id", "attempt", "calls_stored", "generation", "manifest", "run_id", "cursor", "truncated")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CALLS_STORED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    attempt: int
    calls_stored: int
    generation: int
    manifest: int
    run_id: str
    cursor: int
    truncated: bool
    def __init__(self, rollout_id: _Optional[str] = ..., attempt: _Optional[int] = ..., calls_stored: _Optional[int] = ..., generation: _Optional[int] = ..., manifest: _Optional[int] = ..., run_id: _Optional[str] = ..., cursor: _Optional[int] = ..., truncated: bool = ...) -> None: ...

class IncompleteAttempt(_message.Message):
    __slots__ = ("rollout_id", "attempt", "calls_expected", "calls_stored", "reason", "unconverted")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CALLS_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    CALLS_STORED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNCONVERTED_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    attempt: int
    calls_expected: int
    calls_stored: int
    reason: str
    unconverted: bool
    def __init__(self, rollout_id: _Optional[str] = ..., attempt: _Optional[int] = ..., calls_expected: _Optional[int] = ..., calls_stored: _Optional[int] = ..., reason: _Optional[str] = ..., unconverted: bool = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("table", "attempts", "columns", "run_id")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    table: str
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    columns: _containers.RepeatedScalarFieldContainer[str]
    run_id: str
    def __init__(self, table: _Optional[str] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., columns: _Optional[_Iterable[str]] = ..., run_id: _Optional[str] = ...) -> None: ...

class ArrowBatch(_message.Message):
    __slots__ = ("ipc_stream",)
    IPC_STREAM_FIELD_NUMBER: _ClassVar[int]
    ipc_stream: bytes
    def __init__(self, ipc_stream: _Optional[bytes] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("cursor", "run_id")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    run_id: str
    def __init__(self, cursor: _Optional[int] = ..., run_id: _Optional[str] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("counters",)
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    counters: _containers.ScalarMap[str, int]
    def __init__(self, counters: _Optional[_Mapping[str, int]] = ...) -> None: ...
