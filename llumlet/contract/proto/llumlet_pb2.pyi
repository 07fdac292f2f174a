from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_NONE: _ClassVar[Reason]
    UNKNOWN_REQUEST: _ClassVar[Reason]
    REQUEST_FINISHED: _ClassVar[Reason]
    REQUEST_ABORTED: _ClassVar[Reason]
    REQUEST_PREEMPTED: _ClassVar[Reason]
    ALREADY_MIGRATING: _ClassVar[Reason]
    HANDOVER_OPEN: _ClassVar[Reason]
    NOT_STARTED: _ClassVar[Reason]
    PREFILL_RUNNING: _ClassVar[Reason]
    NOT_PORTABLE: _ClassVar[Reason]
    INVALID_REQUEST: _ClassVar[Reason]
    LORA_NOT_AVAILABLE: _ClassVar[Reason]
    REQUEST_TOO_LONG: _ClassVar[Reason]
    INCOMPATIBLE_ENGINE: _ClassVar[Reason]
    SAME_INSTANCE: _ClassVar[Reason]
    WRONG_INSTANCE: _ClassVar[Reason]
    DESTINATION_FULL: _ClassVar[Reason]
    DESTINATION_BUSY: _ClassVar[Reason]
    DESTINATION_PAUSED: _ClassVar[Reason]
    DESTINATION_NEEDS_BLOCKS: _ClassVar[Reason]
    SOURCE_BUSY: _ClassVar[Reason]
    SHUTTING_DOWN: _ClassVar[Reason]
    OTHER_WEIGHTS: _ClassVar[Reason]
    SOURCE_PAUSED: _ClassVar[Reason]
    PEER_UNREACHABLE: _ClassVar[Reason]
    TRANSPORT_UNAVAILABLE: _ClassVar[Reason]
    TRANSFER_FAILED: _ClassVar[Reason]
    DEADLINE: _ClassVar[Reason]
    LEASE_EXPIRED: _ClassVar[Reason]
    UNAUTHENTICATED: _ClassVar[Reason]
    ADDRESS_REFUSED: _ClassVar[Reason]
    STALL_BUDGET: _ClassVar[Reason]
    TOO_MANY_ROUNDS: _ClassVar[Reason]
    BARRED: _ClassVar[Reason]
    CANCELLED: _ClassVar[Reason]
    UNKNOWN_MIGRATION: _ClassVar[Reason]
    OWNER_LOST: _ClassVar[Reason]
    INTERNAL: _ClassVar[Reason]
    NOT_LEADER: _ClassVar[Reason]
    ROLE_REFUSED: _ClassVar[Reason]

class MigrationType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MIGRATION_TYPE_UNSPECIFIED: _ClassVar[MigrationType]
    NUM_REQ: _ClassVar[MigrationType]
    TOKEN: _ClassVar[MigrationType]
    RATIO: _ClassVar[MigrationType]

class Health(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEALTH_UNSPECIFIED: _ClassVar[Health]
    OK: _ClassVar[Health]
    SUSPECT: _ClassVar[Health]
    HUNG: _ClassVar[Health]

class MigrationReqPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MIGRATION_REQ_POLICY_UNSPECIFIED: _ClassVar[MigrationReqPolicy]
    LCR: _ClassVar[MigrationReqPolicy]
    FCR: _ClassVar[MigrationReqPolicy]
    LR: _ClassVar[MigrationReqPolicy]
    SR: _ClassVar[MigrationReqPolicy]
    FCW: _ClassVar[MigrationReqPolicy]
    FCWSR: _ClassVar[MigrationReqPolicy]
    LP: _ClassVar[MigrationReqPolicy]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    LIVE: _ClassVar[Mode]
    BLOCKING: _ClassVar[Mode]
    RECOMPUTE: _ClassVar[Mode]
    WAITING: _ClassVar[Mode]

class MovePhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOVE_PHASE_UNSPECIFIED: _ClassVar[MovePhase]
    SELECTED: _ClassVar[MovePhase]
    RESERVING: _ClassVar[MovePhase]
    COPYING: _ClassVar[MovePhase]
    FREEZING: _ClassVar[MovePhase]
    COMMITTING: _ClassVar[MovePhase]
    WITHDRAWING: _ClassVar[MovePhase]
    FENCING: _ClassVar[MovePhase]
    MOVED: _ClassVar[MovePhase]
    STAYED: _ClassVar[MovePhase]
    GONE: _ClassVar[MovePhase]
    LOST: _ClassVar[MovePhase]
REASON_NONE: Reason
UNKNOWN_REQUEST: Reason
REQUEST_FINISHED: Reason
REQUEST_ABORTED: Reason
REQUEST_PREEMPTED: Reason
ALREADY_MIGRATING: Reason
HANDOVER_OPEN: Reason
NOT_STARTED: Reason
PREFILL_RUNNING: Reason
NOT_PORTABLE: Reason
INVALID_REQUEST: Reason
LORA_NOT_AVAILABLE: Reason
REQUEST_TOO_LONG: Reason
INCOMPATIBLE_ENGINE: Reason
SAME_INSTANCE: Reason
WRONG_INSTANCE: Reason
DESTINATION_FULL: Reason
DESTINATION_BUSY: Reason
DESTINATION_PAUSED: Reason
DESTINATION_NEEDS_BLOCKS: Reason
SOURCE_BUSY: Reason
SHUTTING_DOWN: Reason
OTHER_WEIGHTS: Reason
SOURCE_PAUSED: Reason
PEER_UNREACHABLE: Reason
TRANSPORT_UNAVAILABLE: Reason
TRANSFER_FAILED: Reason
DEADLINE: Reason
LEASE_EXPIRED: Reason
UNAUTHENTICATED: Reason
ADDRESS_REFUSED: Reason
STALL_BUDGET: Reason
TOO_MANY_ROUNDS: Reason
BARRED: Reason
CANCELLED: Reason
UNKNOWN_MIGRATION: Reason
OWNER_LOST: Reason
INTERNAL: Reason
NOT_LEADER: Reason
ROLE_REFUSED: Reason
MIGRATION_TYPE_UNSPECIFIED: MigrationType
NUM_REQ: MigrationType
TOKEN: MigrationType
RATIO: MigrationType
HEALTH_UNSPECIFIED: Health
OK: Health
SUSPECT: Health
HUNG: Health
MIGRATION_REQ_POLICY_UNSPECIFIED: MigrationReqPolicy
LCR: MigrationReqPolicy
FCR: MigrationReqPolicy
LR: MigrationReqPolicy
SR: MigrationReqPolicy
FCW: MigrationReqPolicy
FCWSR: MigrationReqPolicy
LP: MigrationReqPolicy
MODE_UNSPECIFIED: Mode
LIVE: Mode
BLOCKING: Mode
RECOMPUTE: Mode
WAITING: Mode
MOVE_PHASE_UNSPECIFIED: MovePhase
SELECTED: MovePhase
RESERVING: MovePhase
COPYING: MovePhase
FREEZING: MovePhase
COMMITTING: MovePhase
WITHDRAWING: MovePhase
FENCING: MovePhase
MOVED: MovePhase
STAYED: MovePhase
GONE: MovePhase
LOST: MovePhase

class Epoch(_message.Message):
    __slots__ = ("term", "hop")
    TERM_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    term: int
    hop: int
    def __init__(self, term: _Optional[int] = ..., hop: _Optional[int] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("src_engine_id", "dst_engine_id", "dst_engine_ip", "dst_engine_port", "migration_type", "migration_req_policy", "num_reqs", "num_tokens", "kv_cache_usage_ratio", "trigger_policy", "request_ids", "method", "force", "stall_budget_ms", "leader_term")
    SRC_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DST_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DST_ENGINE_IP_FIELD_NUMBER: _ClassVar[int]
    DST_ENGINE_PORT_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_TYPE_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_REQ_POLICY_FIELD_NUMBER: _ClassVar[int]
    NUM_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_RATIO_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_POLICY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    STALL_BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    LEADER_TERM_FIELD_NUMBER: _ClassVar[int]
    src_engine_id: str
    dst_engine_id: str
    dst_engine_ip: str
    dst_engine_port: int
    migration_type: MigrationType
    migration_req_policy: MigrationReqPolicy
    num_reqs: int
    num_tokens: int
    kv_cache_usage_ratio: float
    trigger_policy: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    method: Mode
    force: bool
    stall_budget_ms: float
    leader_term: int
    def __init__(self, src_engine_id: _Optional[str] = ..., dst_engine_id: _Optional[str] = ..., dst_engine_ip: _Optional[str] = ..., dst_engine_port: _Optional[int] = ..., migration_type: _Optional[_Union[MigrationType, str]] = ..., migration_req_policy: _Optional[_Union[MigrationReqPolicy, str]] = ..., num_reqs: _Optional[int] = ..., num_tokens: _Optional[int] = ..., kv_cache_usage_ratio: _Optional[float] = ..., trigger_policy: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ..., method: _Optional[_Union[Mode, str]] = ..., force: _Optional[bool] = ..., stall_budget_ms: _Optional[float] = ..., leader_term: _Optional[int] = ...) -> None: ...

class MigrateInRequest(_message.Message):
    __slots__ = ("src_address", "request")
    SRC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    src_address: str
    request: MigrateRequest
    def __init__(self, src_address: _Optional[str] = ..., request: _Optional[_Union[MigrateRequest, _Mapping[str, object]]] = ...) -> None: ...

class MigrateEvent(_message.Message):
    __slots__ = ("progress", "summary")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    progress: MoveProgress
    summary: MoveSummary
    def __init__(self, progress: _Optional[_Union[MoveProgress, _Mapping[str, object]]] = ..., summary: _Optional[_Union[MoveSummary, _Mapping[str, object]]] = ...) -> None: ...

class MoveProgress(_message.Message):
    __slots__ = ("migration_id", "request_id", "external_request_id", "phase", "reason", "detail", "mode", "rounds", "copied_bytes", "recomputed_tokens", "context_tokens", "hit_tokens", "epoch", "transport", "phase_ms", "tokens_alone", "trigger_policy")
    class PhaseMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PHASE_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_ALONE_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_POLICY_FIELD_NUMBER: _ClassVar[int]
    migration_id: str
    request_id: str
    external_request_id: str
    phase: MovePhase
    reason: Reason
    detail: str
    mode: Mode
    rounds: int
    copied_bytes: int
    recomputed_tokens: int
    context_tokens: int
    hit_tokens: int
    epoch: Epoch
    transport: str
    phase_ms: _containers.ScalarMap[str, float]
    tokens_alone: str
    trigger_policy: str
    def __init__(self, migration_id: _Optional[str] = ..., request_id: _Optional[str] = ..., external_request_id: _Optional[str] = ..., phase: _Optional[_Union[MovePhase, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ..., mode: _Optional[_Union[Mode, str]] = ..., rounds: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., epoch: _Optional[_Union[Epoch, _Mapping[str, object]]] = ..., transport: _Optional[str] = ..., phase_ms: _Optional[_Mapping[str, float]] = ..., tokens_alone: _Optional[str] = ..., trigger_policy: _Optional[str] = ...) -> None: ...

class MoveSummary(_message.Message):
    __slots__ = ("selected", "moved", "stayed", "gone", "lost", "total_ms", "recomputed")
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    STAYED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    selected: int
    moved: int
    stayed: int
    gone: int
    lost: int
    total_ms: float
    recomputed: int
    def __init__(self, selected: _Optional[int] = ..., moved: _Optional[int] = ..., stayed: _Optional[int] = ..., gone: _Optional[int] = ..., lost: _Optional[int] = ..., total_ms: _Optional[float] = ..., recomputed: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("engine_id", "destinations", "timeout_s")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    destinations: _containers.RepeatedScalarFieldContainer[str]
    timeout_s: float
    def __init__(self, engine_id: _Optional[str] = ..., destinations: _Optional[_Iterable[str]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("elapsed_s", "timeout_s", "num_streams", "num_requests", "num_moving", "num_moved", "refusals", "done", "num_cut", "num_recomputed")
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVING_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    NUM_CUT_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    elapsed_s: float
    timeout_s: float
    num_streams: int
    num_requests: int
    num_moving: int
    num_moved: int
    refusals: _containers.ScalarMap[str, int]
    done: bool
    num_cut: int
    num_recomputed: int
    def __init__(self, elapsed_s: _Optional[float] = ..., timeout_s: _Optional[float] = ..., num_streams: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_moving: _Optional[int] = ..., num_moved: _Optional[int] = ..., refusals: _Optional[_Mapping[str, int]] = ..., done: _Optional[bool] = ..., num_cut: _Optional[int] = ..., num_recomputed: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("results",)
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[AbortResponse.Outcome]
        ABORTED: _ClassVar[AbortResponse.Outcome]
        FORWARDED: _ClassVar[AbortResponse.Outcome]
        NOT_FOUND: _ClassVar[AbortResponse.Outcome]
    OUTCOME_UNSPECIFIED: AbortResponse.Outcome
    ABORTED: AbortResponse.Outcome
    FORWARDED: AbortResponse.Outcome
    NOT_FOUND: AbortResponse.Outcome
    class Result(_message.Message):
        __slots__ = ("request_id", "outcome", "owner_address")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        OWNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
        request_id: str
        outcome: AbortResponse.Outcome
        owner_address: str
        def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[_Union[AbortResponse.Outcome, str]] = ..., owner_address: _Optional[str] = ...) -> None: ...
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[AbortResponse.Result]
    def __init__(self, results: _Optional[_Iterable[_Union[AbortResponse.Result, _Mapping[str, object]]]] = ...) -> None: ...

class AbortMigrateInRequest(_message.Message):
    __slots__ = ("migration_ids", "request_ids")
    MIGRATION_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    migration_ids: _containers.RepeatedScalarFieldContainer[str]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, migration_ids: _Optional[_Iterable[str]] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortMigrateInResponse(_message.Message):
    __slots__ = ("results",)
    class Result(_message.Message):
        __slots__ = ("id", "migration_id", "state")
        ID_FIELD_NUMBER: _ClassVar[int]
        MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        id: str
        migration_id: str
        state: Handover.State
        def __init__(self, id: _Optional[str] = ..., migration_id: _Optional[str] = ..., state: _Optional[_Union[Handover.State, str]] = ...) -> None: ...
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[AbortMigrateInResponse.Result]
    def __init__(self, results: _Optional[_Iterable[_Union[AbortMigrateInResponse.Result, _Mapping[str, object]]]] = ...) -> None: ...

class GetInstanceStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepSample(_message.Message):
    __slots__ = ("number", "prefill_tokens", "pairs", "num_decodes", "decode_kv", "seconds")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    DECODE_KV_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    prefill_tokens: int
    pairs: int
    num_decodes: int
    decode_kv: int
    seconds: float
    def __init__(self, number: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., pairs: _Optional[int] = ..., num_decodes: _Optional[int] = ..., decode_kv: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class InstanceStatus(_message.Message):
    __slots__ = ("instance_id", "schedulable", "timestamp_ms", "step_id", "update_id", "recent_waiting_requests", "waiting_requests", "hybrid_scheduler_waiting_to_decode_requests_num", "scheduler_waiting_to_decode_requests_num", "num_waiting_requests", "scheduler_running_to_decode_requests_num", "num_running_requests", "num_loading_requests", "num_total_gpu_tokens", "num_used_gpu_tokens", "num_uncomputed_tokens_hybrid_scheduler_waiting_prefills", "num_unallocated_tokens_hybrid_scheduler_waiting_decodes", "hybrid_scheduler_waiting_to_decode_tokens_num", "num_uncomputed_tokens_scheduler_waiting_prefills", "scheduler_waiting_to_decode_tokens_num", "num_uncomputed_tokens_scheduler_running_prefills", "num_unallocated_tokens_scheduler_running_prefills", "scheduler_running_to_decode_tokens_num", "num_tokens_loading_requests", "num_uncomputed_tokens_all_waiting_prefills", "num_migrate_in_reqs", "num_migrate_out_reqs", "num_available_migrate_in_slots", "num_available_migrate_out_slots", "num_migrate_in_tokens", "num_migrate_out_tokens", "num_available_migrate_in_tokens", "num_available_migrate_out_tokens", "kv_cache_usage_ratio_migrate_in", "kv_cache_usage_ratio_migrate_out", "available_kv_cache_usage_ratio_migrate_in", "available_kv_cache_usage_ratio_migrate_out", "profiling_id", "step_duration", "num_scheduled_prefill_tokens", "incarnation", "num_total_blocks", "num_free_blocks", "num_pinned_blocks", "num_reserved_blocks", "num_draining_blocks", "loop_age_ms", "health", "num_adopted", "num_rescued", "num_preemptions", "kv_unsupported", "busy_with", "num_unallocated_tokens_all_waiting_requests", "steps", "num_decode_steps", "decode_steps_requests", "decode_steps_kv", "decode_steps_s", "num_uncomputed_pairs", "num_gone", "gone_tokens", "coming_blocks", "coming_ends", "num_computed_tokens", "num_recomputed_tokens", "num_averted_preemptions", "num_lacking_blocks", "num_urgent_requests", "scheduler_running_to_decode_urgent_requests_num", "num_unallocated_tokens_first_waiting_request")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULABLE_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    RECENT_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HYBRID_SCHEDULER_WAITING_TO_DECODE_REQUESTS_NUM_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_WAITING_TO_DECODE_REQUESTS_NUM_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_RUNNING_TO_DECODE_REQUESTS_NUM_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_GPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_GPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCOMPUTED_TOKENS_HYBRID_SCHEDULER_WAITING_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNALLOCATED_TOKENS_HYBRID_SCHEDULER_WAITING_DECODES_FIELD_NUMBER: _ClassVar[int]
    HYBRID_SCHEDULER_WAITING_TO_DECODE_TOKENS_NUM_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCOMPUTED_TOKENS_SCHEDULER_WAITING_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_WAITING_TO_DECODE_TOKENS_NUM_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCOMPUTED_TOKENS_SCHEDULER_RUNNING_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNALLOCATED_TOKENS_SCHEDULER_RUNNING_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_RUNNING_TO_DECODE_TOKENS_NUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_LOADING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCOMPUTED_TOKENS_ALL_WAITING_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATE_IN_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATE_OUT_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_AVAILABLE_MIGRATE_IN_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_AVAILABLE_MIGRATE_OUT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATE_IN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATE_OUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_AVAILABLE_MIGRATE_IN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_AVAILABLE_MIGRATE_OUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_RATIO_MIGRATE_IN_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_RATIO_MIGRATE_OUT_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_KV_CACHE_USAGE_RATIO_MIGRATE_IN_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_KV_CACHE_USAGE_RATIO_MIGRATE_OUT_FIELD_NUMBER: _ClassVar[int]
    PROFILING_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_DURATION_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAINING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOOP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    NUM_ADOPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESCUED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_UNSUPPORTED_FIELD_NUMBER: _ClassVar[int]
    BUSY_WITH_FIELD_NUMBER: _ClassVar[int]
    NUM_UNALLOCATED_TOKENS_ALL_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_KV_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_S_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCOMPUTED_PAIRS_FIELD_NUMBER: _ClassVar[int]
    NUM_GONE_FIELD_NUMBER: _ClassVar[int]
    GONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMING_ENDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_AVERTED_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LACKING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_URGENT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_RUNNING_TO_DECODE_URGENT_REQUESTS_NUM_FIELD_NUMBER: _ClassVar[int]
    NUM_UNALLOCATED_TOKENS_FIRST_WAITING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    schedulable: bool
    timestamp_ms: int
    step_id: int
    update_id: int
    recent_waiting_requests: _containers.RepeatedScalarFieldContainer[str]
    waiting_requests: _containers.RepeatedScalarFieldContainer[str]
    hybrid_scheduler_waiting_to_decode_requests_num: int
    scheduler_waiting_to_decode_requests_num: int
    num_waiting_requests: int
    scheduler_running_to_decode_requests_num: int
    num_running_requests: int
    num_loading_requests: int
    num_total_gpu_tokens: int
    num_used_gpu_tokens: int
    num_uncomputed_tokens_hybrid_scheduler_waiting_prefills: int
    num_unallocated_tokens_hybrid_scheduler_waiting_decodes: int
    hybrid_scheduler_waiting_to_decode_tokens_num: int
    num_uncomputed_tokens_scheduler_waiting_prefills: int
    scheduler_waiting_to_decode_tokens_num: int
    num_uncomputed_tokens_scheduler_running_prefills: int
    num_unallocated_tokens_scheduler_running_prefills: int
    scheduler_running_to_decode_tokens_num: int
    num_tokens_loading_requests: int
    num_uncomputed_tokens_all_waiting_prefills: int
    num_migrate_in_reqs: int
    num_migrate_out_reqs: int
    num_available_migrate_in_slots: int
    num_available_migrate_out_slots: int
    num_migrate_in_tokens: int
    num_migrate_out_tokens: int
    num_available_migrate_in_tokens: int
    num_available_migrate_out_tokens: int
    kv_cache_usage_ratio_migrate_in: float
    kv_cache_usage_ratio_migrate_out: float
    available_kv_cache_usage_ratio_migrate_in: float
    available_kv_cache_usage_ratio_migrate_out: float
    profiling_id: int
    step_duration: float
    num_scheduled_prefill_tokens: int
    incarnation: str
    num_total_blocks: int
    num_free_blocks: int
    num_pinned_blocks: int
    num_reserved_blocks: int
    num_draining_blocks: int
    loop_age_ms: float
    health: Health
    num_adopted: int
    num_rescued: int
    num_preemptions: int
    kv_unsupported: str
    busy_with: str
    num_unallocated_tokens_all_waiting_requests: int
    steps: _containers.RepeatedCompositeFieldContainer[StepSample]
    num_decode_steps: int
    decode_steps_requests: int
    decode_steps_kv: int
    decode_steps_s: float
    num_uncomputed_pairs: int
    num_gone: int
    gone_tokens: int
    coming_blocks: _containers.RepeatedScalarFieldContainer[int]
    coming_ends: _containers.RepeatedScalarFieldContainer[int]
    num_computed_tokens: int
    num_recomputed_tokens: int
    num_averted_preemptions: int
    num_lacking_blocks: int
    num_urgent_requests: int
    scheduler_running_to_decode_urgent_requests_num: int
    num_unallocated_tokens_first_waiting_request: int
    def __init__(self, instance_id: _Optional[str] = ..., schedulable: _Optional[bool] = ..., timestamp_ms: _Optional[int] = ..., step_id: _Optional[int] = ..., update_id: _Optional[int] = ..., recent_waiting_requests: _Optional[_Iterable[str]] = ..., waiting_requests: _Optional[_Iterable[str]] = ..., hybrid_scheduler_waiting_to_decode_requests_num: _Optional[int] = ..., scheduler_waiting_to_decode_requests_num: _Optional[int] = ..., num_waiting_requests: _Optional[int] = ..., scheduler_running_to_decode_requests_num: _Optional[int] = ..., num_running_requests: _Optional[int] = ..., num_loading_requests: _Optional[int] = ..., num_total_gpu_tokens: _Optional[int] = ..., num_used_gpu_tokens: _Optional[int] = ..., num_uncomputed_tokens_hybrid_scheduler_waiting_prefills: _Optional[int] = ..., num_unallocated_tokens_hybrid_scheduler_waiting_decodes: _Optional[int] = ..., hybrid_scheduler_waiting_to_decode_tokens_num: _Optional[int] = ..., num_uncomputed_tokens_scheduler_waiting_prefills: _Optional[int] = ..., scheduler_waiting_to_decode_tokens_num: _Optional[int] = ..., num_uncomputed_tokens_scheduler_running_prefills: _Optional[int] = ..., num_unallocated_tokens_scheduler_running_prefills: _Optional[int] = ..., scheduler_running_to_decode_tokens_num: _Optional[int] = ..., num_tokens_loading_requests: _Optional[int] = ..., num_uncomputed_tokens_all_waiting_prefills: _Optional[int] = ..., num_migrate_in_reqs: _Optional[int] = ..., num_migrate_out_reqs: _Optional[int] = ..., num_available_migrate_in_slots: _Optional[int] = ..., num_available_migrate_out_slots: _Optional[int] = ..., num_migrate_in_tokens: _Optional[int] = ..., num_migrate_out_tokens: _Optional[int] = ..., num_available_migrate_in_tokens: _Optional[int] = ..., num_available_migrate_out_tokens: _Optional[int] = ..., kv_cache_usage_ratio_migrate_in: _Optional[float] = ..., kv_cache_usage_ratio_migrate_out: _Optional[float] = ..., available_kv_cache_usage_ratio_migrate_in: _Optional[float] = ..., available_kv_cache_usage_ratio_migrate_out: _Optional[float] = ..., profiling_id: _Optional[int] = ..., step_duration: _Optional[float] = ..., num_scheduled_prefill_tokens: _Optional[int] = ..., incarnation: _Optional[str] = ..., num_total_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_pinned_blocks: _Optional[int] = ..., num_reserved_blocks: _Optional[int] = ..., num_draining_blocks: _Optional[int] = ..., loop_age_ms: _Optional[float] = ..., health: _Optional[_Union[Health, str]] = ..., num_adopted: _Optional[int] = ..., num_rescued: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., kv_unsupported: _Optional[str] = ..., busy_with: _Optional[str] = ..., num_unallocated_tokens_all_waiting_requests: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[StepSample, _Mapping[str, object]]]] = ..., num_decode_steps: _Optional[int] = ..., decode_steps_requests: _Optional[int] = ..., decode_steps_kv: _Optional[int] = ..., decode_steps_s: _Optional[float] = ..., num_uncomputed_pairs: _Optional[int] = ..., num_gone: _Optional[int] = ..., gone_tokens: _Optional[int] = ..., coming_blocks: _Optional[_Iterable[int]] = ..., coming_ends: _Optional[_Iterable[int]] = ..., num_computed_tokens: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ..., num_averted_preemptions: _Optional[int] = ..., num_lacking_blocks: _Optional[int] = ..., num_urgent_requests: _Optional[int] = ..., scheduler_running_to_decode_urgent_requests_num: _Optional[int] = ..., num_unallocated_tokens_first_waiting_request: _Optional[int] = ...) -> None: ...

class GetInstanceMetadataRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InstanceMetadata(_message.Message):
    __slots__ = ("instance_id", "instance_type", "backend_type", "ip", "ip_kvs", "api_server_port", "llumlet_port", "kvt_port", "node_id", "data_parallel_size", "tensor_parallel_size", "unit_id", "dp_rank", "ep_rank", "dp_local_rank", "utc_create", "utc_update", "ip_kvt", "block_size", "max_num_batched_tokens", "incarnation", "version", "engine_version", "patch_digest", "model", "max_model_len", "num_total_blocks", "bytes_per_block", "transports", "max_migrations_in", "max_migrations_out", "stall_budget_ms", "exact", "compatibility_digest", "cache_digest", "served_models", "unsupported", "cache_block_size", "adapters", "max_num_seqs")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_TYPE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_TYPE_FIELD_NUMBER: _ClassVar[int]
    IP_FIELD_NUMBER: _ClassVar[int]
    IP_KVS_FIELD_NUMBER: _ClassVar[int]
    API_SERVER_PORT_FIELD_NUMBER: _ClassVar[int]
    LLUMLET_PORT_FIELD_NUMBER: _ClassVar[int]
    KVT_PORT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    UNIT_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    EP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    UTC_CREATE_FIELD_NUMBER: _ClassVar[int]
    UTC_UPDATE_FIELD_NUMBER: _ClassVar[int]
    IP_KVT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PATCH_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MIGRATIONS_IN_FIELD_NUMBER: _ClassVar[int]
    MAX_MIGRATIONS_OUT_FIELD_NUMBER: _ClassVar[int]
    STALL_BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CACHE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODELS_FIELD_NUMBER: _ClassVar[int]
    UNSUPPORTED_FIELD_NUMBER: _ClassVar[int]
    CACHE_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    instance_type: str
    backend_type: str
    ip: str
    ip_kvs: str
    api_server_port: int
    llumlet_port: int
    kvt_port: int
    node_id: str
    data_parallel_size: int
    tensor_parallel_size: int
    unit_id: str
    dp_rank: int
    ep_rank: int
    dp_local_rank: int
    utc_create: float
    utc_update: float
    ip_kvt: str
    block_size: int
    max_num_batched_tokens: int
    incarnation: str
    version: str
    engine_version: str
    patch_digest: str
    model: str
    max_model_len: int
    num_total_blocks: int
    bytes_per_block: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    max_migrations_in: int
    max_migrations_out: int
    stall_budget_ms: float
    exact: bool
    compatibility_digest: str
    cache_digest: str
    served_models: _containers.RepeatedScalarFieldContainer[str]
    unsupported: str
    cache_block_size: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    max_num_seqs: int
    def __init__(self, instance_id: _Optional[str] = ..., instance_type: _Optional[str] = ..., backend_type: _Optional[str] = ..., ip: _Optional[str] = ..., ip_kvs: _Optional[str] = ..., api_server_port: _Optional[int] = ..., llumlet_port: _Optional[int] = ..., kvt_port: _Optional[int] = ..., node_id: _Optional[str] = ..., data_parallel_size: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., unit_id: _Optional[str] = ..., dp_rank: _Optional[int] = ..., ep_rank: _Optional[int] = ..., dp_local_rank: _Optional[int] = ..., utc_create: _Optional[float] = ..., utc_update: _Optional[float] = ..., ip_kvt: _Optional[str] = ..., block_size: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., incarnation: _Optional[str] = ..., version: _Optional[str] = ..., engine_version: _Optional[str] = ..., patch_digest: _Optional[str] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., max_migrations_in: _Optional[int] = ..., max_migrations_out: _Optional[int] = ..., stall_budget_ms: _Optional[float] = ..., exact: _Optional[bool] = ..., compatibility_digest: _Optional[str] = ..., cache_digest: _Optional[str] = ..., served_models: _Optional[_Iterable[str]] = ..., unsupported: _Optional[str] = ..., cache_block_size: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., max_num_seqs: _Optional[int] = ...) -> None: ...

class WatchCacheRequest(_message.Message):
    __slots__ = ("engine_id", "incarnation", "interval_s")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    incarnation: str
    interval_s: float
    def __init__(self, engine_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., interval_s: _Optional[float] = ...) -> None: ...

class CacheChanges(_message.Message):
    __slots__ = ("number", "reset", "stored", "removed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    number: int
    reset: bool
    stored: bytes
    removed: bytes
    def __init__(self, number: _Optional[int] = ..., reset: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("instance_id", "incarnation", "requests")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    incarnation: str
    requests: _containers.RepeatedCompositeFieldContainer[RequestInfo]
    def __init__(self, instance_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., requests: _Optional[_Iterable[_Union[RequestInfo, _Mapping[str, object]]]] = ...) -> None: ...

class RequestInfo(_message.Message):
    __slots__ = ("request_id", "external_request_id", "phase", "status", "prompt_tokens", "output_tokens", "computed_tokens", "num_blocks", "origin", "epoch", "movable", "reason", "detail", "priority", "arrival_time", "move", "moves_as")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[RequestInfo.Phase]
        WAITING: _ClassVar[RequestInfo.Phase]
        PREFILL: _ClassVar[RequestInfo.Phase]
        DECODE: _ClassVar[RequestInfo.Phase]
        PREEMPTED: _ClassVar[RequestInfo.Phase]
        FROZEN: _ClassVar[RequestInfo.Phase]
        RESERVED: _ClassVar[RequestInfo.Phase]
    PHASE_UNSPECIFIED: RequestInfo.Phase
    WAITING: RequestInfo.Phase
    PREFILL: RequestInfo.Phase
    DECODE: RequestInfo.Phase
    PREEMPTED: RequestInfo.Phase
    FROZEN: RequestInfo.Phase
    RESERVED: RequestInfo.Phase
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MOVABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_TIME_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    MOVES_AS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    external_request_id: str
    phase: RequestInfo.Phase
    status: str
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    num_blocks: int
    origin: str
    epoch: Epoch
    movable: bool
    reason: Reason
    detail: str
    priority: int
    arrival_time: float
    move: MoveInfo
    moves_as: Mode
    def __init__(self, request_id: _Optional[str] = ..., external_request_id: _Optional[str] = ..., phase: _Optional[_Union[RequestInfo.Phase, str]] = ..., status: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., origin: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping[str, object]]] = ..., movable: _Optional[bool] = ..., reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ..., priority: _Optional[int] = ..., arrival_time: _Optional[float] = ..., move: _Optional[_Union[MoveInfo, _Mapping[str, object]]] = ..., moves_as: _Optional[_Union[Mode, str]] = ...) -> None: ...

class MoveInfo(_message.Message):
    __slots__ = ("migration_id", "direction", "phase", "peer_instance_id", "peer_address", "transport")
    class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DIRECTION_UNSPECIFIED: _ClassVar[MoveInfo.Direction]
        OUT: _ClassVar[MoveInfo.Direction]
        IN: _ClassVar[MoveInfo.Direction]
    DIRECTION_UNSPECIFIED: MoveInfo.Direction
    OUT: MoveInfo.Direction
    IN: MoveInfo.Direction
    MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PEER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    migration_id: str
    direction: MoveInfo.Direction
    phase: MovePhase
    peer_instance_id: str
    peer_address: str
    transport: str
    def __init__(self, migration_id: _Optional[str] = ..., direction: _Optional[_Union[MoveInfo.Direction, str]] = ..., phase: _Optional[_Union[MovePhase, str]] = ..., peer_instance_id: _Optional[str] = ..., peer_address: _Optional[str] = ..., transport: _Optional[str] = ...) -> None: ...

class InstanceReport(_message.Message):
    __slots__ = ("metadata", "status", "leaving")
    METADATA_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    metadata: InstanceMetadata
    status: InstanceStatus
    leaving: bool
    def __init__(self, metadata: _Optional[_Union[InstanceMetadata, _Mapping[str, object]]] = ..., status: _Optional[_Union[InstanceStatus, _Mapping[str, object]]] = ..., leaving: _Optional[bool] = ...) -> None: ...

class ReportTaken(_message.Message):
    __slots__ = ("min_interval_s",)
    MIN_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    min_interval_s: float
    def __init__(self, min_interval_s: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ViewChange(_message.Message):
    __slots__ = ("instance", "left", "complete", "fell_silent")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    FELL_SILENT_FIELD_NUMBER: _ClassVar[int]
    instance: InstanceState
    left: str
    complete: bool
    fell_silent: bool
    def __init__(self, instance: _Optional[_Union[InstanceState, _Mapping[str, object]]] = ..., left: _Optional[str] = ..., complete: _Optional[bool] = ..., fell_silent: _Optional[bool] = ...) -> None: ...

class PeersRequest(_message.Message):
    __slots__ = ("instance_ids", "compatibility_digest", "number")
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    compatibility_digest: str
    number: int
    def __init__(self, instance_ids: _Optional[_Iterable[str]] = ..., compatibility_digest: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class PeersResponse(_message.Message):
    __slots__ = ("peers", "compatibility_digest")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[PeerInfo]
    compatibility_digest: str
    def __init__(self, peers: _Optional[_Iterable[_Union[PeerInfo, _Mapping[str, object]]]] = ..., compatibility_digest: _Optional[str] = ...) -> None: ...

class PeerInfo(_message.Message):
    __slots__ = ("instance_id", "address", "room_tokens")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROOM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    address: str
    room_tokens: int
    def __init__(self, instance_id: _Optional[str] = ..., address: _Optional[str] = ..., room_tokens: _Optional[int] = ...) -> None: ...

class InstanceState(_message.Message):
    __slots__ = ("metadata", "status", "age_s")
    METADATA_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    metadata: InstanceMetadata
    status: InstanceStatus
    age_s: float
    def __init__(self, metadata: _Optional[_Union[InstanceMetadata, _Mapping[str, object]]] = ..., status: _Optional[_Union[InstanceStatus, _Mapping[str, object]]] = ..., age_s: _Optional[float] = ...) -> None: ...

class Handover(_message.Message):
    __slots__ = ("migration_id", "request_id", "src_incarnation", "dst_incarnation", "step")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Handover.State]
        PENDING: _ClassVar[Handover.State]
        COMMITTED: _ClassVar[Handover.State]
        BARRED: _ClassVar[Handover.State]
        UNKNOWN: _ClassVar[Handover.State]
    STATE_UNSPECIFIED: Handover.State
    PENDING: Handover.State
    COMMITTED: Handover.State
    BARRED: Handover.State
    UNKNOWN: Handover.State
    MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SRC_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DST_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    migration_id: str
    request_id: str
    src_incarnation: str
    dst_incarnation: str
    step: int
    def __init__(self, migration_id: _Optional[str] = ..., request_id: _Optional[str] = ..., src_incarnation: _Optional[str] = ..., dst_incarnation: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("handover", "src_engine_id", "dst_engine_id", "src_address", "request_state", "source_memory", "num_blocks", "method", "tokens_will_do", "computed_tokens", "row_tokens")
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    SRC_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DST_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SRC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_STATE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_WILL_DO_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handover: Handover
    src_engine_id: str
    dst_engine_id: str
    src_address: str
    request_state: bytes
    source_memory: bytes
    num_blocks: int
    method: Mode
    tokens_will_do: bool
    computed_tokens: int
    row_tokens: int
    def __init__(self, handover: _Optional[_Union[Handover, _Mapping[str, object]]] = ..., src_engine_id: _Optional[str] = ..., dst_engine_id: _Optional[str] = ..., src_address: _Optional[str] = ..., request_state: _Optional[bytes] = ..., source_memory: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., method: _Optional[_Union[Mode, str]] = ..., tokens_will_do: _Optional[bool] = ..., computed_tokens: _Optional[int] = ..., row_tokens: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("hit_blocks", "lease_s", "dst_incarnation", "transport", "tokens_alone", "row_tokens")
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    DST_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_ALONE_FIELD_NUMBER: _ClassVar[int]
    ROW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    hit_blocks: int
    lease_s: float
    dst_incarnation: str
    transport: str
    tokens_alone: str
    row_tokens: int
    def __init__(self, hit_blocks: _Optional[int] = ..., lease_s: _Optional[float] = ..., dst_incarnation: _Optional[str] = ..., transport: _Optional[str] = ..., tokens_alone: _Optional[str] = ..., row_tokens: _Optional[int] = ...) -> None: ...

class CopyRoundRequest(_message.Message):
    __slots__ = ("handover", "round", "from_block", "to_block", "num_tokens", "block_ids", "new_token_ids")
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TO_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    handover: Handover
    round: int
    from_block: int
    to_block: int
    num_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    new_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handover: _Optional[_Union[Handover, _Mapping[str, object]]] = ..., round: _Optional[int] = ..., from_block: _Optional[int] = ..., to_block: _Optional[int] = ..., num_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., new_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CopyRoundResponse(_message.Message):
    __slots__ = ("round", "copied_bytes", "seconds", "lease_s")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    round: int
    copied_bytes: int
    seconds: float
    lease_s: float
    def __init__(self, round: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., lease_s: _Optional[float] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("handover", "epoch", "base", "computed_tokens", "from_block", "block_ids", "new_token_ids", "state_ids", "num_accepted_drafts", "accepted_state_ids")
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STATE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_STATE_IDS_FIELD_NUMBER: _ClassVar[int]
    handover: Handover
    epoch: Epoch
    base: int
    computed_tokens: int
    from_block: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    new_token_ids: _containers.RepeatedScalarFieldContainer[int]
    state_ids: _containers.RepeatedScalarFieldContainer[int]
    num_accepted_drafts: int
    accepted_state_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handover: _Optional[_Union[Handover, _Mapping[str, object]]] = ..., epoch: _Optional[_Union[Epoch, _Mapping[str, object]]] = ..., base: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., from_block: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., new_token_ids: _Optional[_Iterable[int]] = ..., state_ids: _Optional[_Iterable[int]] = ..., num_accepted_drafts: _Optional[int] = ..., accepted_state_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("state", "reason", "detail", "copied_bytes", "recomputed_tokens", "phase_ms", "dst_incarnation")
    class PhaseMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PHASE_MS_FIELD_NUMBER: _ClassVar[int]
    DST_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    state: Handover.State
    reason: Reason
    detail: str
    copied_bytes: int
    recomputed_tokens: int
    phase_ms: _containers.ScalarMap[str, float]
    dst_incarnation: str
    def __init__(self, state: _Optional[_Union[Handover.State, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ..., copied_bytes: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., phase_ms: _Optional[_Mapping[str, float]] = ..., dst_incarnation: _Optional[str] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("handover", "reason", "detail")
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    handover: Handover
    reason: Reason
    detail: str
    def __init__(self, handover: _Optional[_Union[Handover, _Mapping[str, object]]] = ..., reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class SettleResponse(_message.Message):
    __slots__ = ("state", "reason", "detail", "dst_incarnation")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    DST_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    state: Handover.State
    reason: Reason
    detail: str
    dst_incarnation: str
    def __init__(self, state: _Optional[_Union[Handover.State, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ..., dst_incarnation: _Optional[str] = ...) -> None: ...

class AdoptRequest(_message.Message):
    __slots__ = ("epoch", "compatibility_digest", "request_state", "holder", "weight_version", "trial_tokens")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_STATE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    compatibility_digest: str
    request_state: bytes
    holder: Holder
    weight_version: str
    trial_tokens: int
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping[str, object]]] = ..., compatibility_digest: _Optional[str] = ..., request_state: _Optional[bytes] = ..., holder: _Optional[_Union[Holder, _Mapping[str, object]]] = ..., weight_version: _Optional[str] = ..., trial_tokens: _Optional[int] = ...) -> None: ...

class AdoptResponse(_message.Message):
    __slots__ = ("instance_id", "incarnation", "copied_bytes", "recomputed_tokens")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    incarnation: str
    copied_bytes: int
    recomputed_tokens: int
    def __init__(self, instance_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., copied_bytes: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ...) -> None: ...

class CachedPrefixRequest(_message.Message):
    __slots__ = ("blocks", "block_size")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    block_size: int
    def __init__(self, blocks: _Optional[bytes] = ..., block_size: _Optional[int] = ...) -> None: ...

class CachedPrefixResponse(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("instance_id", "incarnation", "address")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    incarnation: str
    address: str
    def __init__(self, instance_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "incarnation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: Epoch
    incarnation: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping[str, object]]] = ..., incarnation: _Optional[str] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("claim_id", "source_memory", "computed_tokens", "block_ids", "output_token_ids")
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    claim_id: str
    source_memory: bytes
    computed_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, claim_id: _Optional[str] = ..., source_memory: _Optional[bytes] = ..., computed_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class EndClaimRequest(_message.Message):
    __slots__ = ("claim_id",)
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    claim_id: str
    def __init__(self, claim_id: _Optional[str] = ...) -> None: ...

class EndClaimResponse(_message.Message):
    __slots__ = ("intact",)
    INTACT_FIELD_NUMBER: _ClassVar[int]
    intact: bool
    def __init__(self, intact: _Optional[bool] = ...) -> None: ...
