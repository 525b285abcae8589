"""The gateway's database: what must survive `kill -9`.

SQLAlchemy Core, fit for SQLite and PostgreSQL alike. JSON is kept as text: the database never looks inside.
Times are Unix seconds.
"""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    text,
)

__all__ = [
    "SCHEMA_VERSION",
    "attempts",
    "calls",
    "counters",
    "engines",
    "meta",
    "metadata",
    "outbox",
    "policies",
    "replicas",
    "rewards",
    "rollouts",
]

SCHEMA_VERSION: Final = 3
metadata = MetaData()
_Id = String(200)
_Serial = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only for INTEGER

meta = Table(
    "meta", metadata, Column("key", String(64), primary_key=True), Column("value", Text, nullable=False)
)
"""`schema`, `signing_key`, `change`: the last number given to a finished rollout, and `epoch`: of the gateways."""

rollouts = Table(
    "rollouts",
    metadata,
    Column(
        "seq", _Serial, primary_key=True, autoincrement=True
    ),  # order of enqueueing, and the cursor of lists
    Column("rollout_id", _Id, nullable=False, unique=True),
    Column("run_id", _Id, nullable=False),
    Column("group_id", _Id, nullable=False),
    Column("task_id", _Id, nullable=False),
    Column("split", String(8), nullable=False),
    Column("policy", _Id, nullable=False),
    Column("input", Text, nullable=False),
    Column("reference", Text),  # never shown to an agent
    Column("sampling", Text),
    Column("rights", Text),
    Column("max_attempts", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("revoked", Integer, nullable=False),  # tokens of attempts up to this one are worth nothing
    Column("state", String(16), nullable=False),
    Column("attempt", Integer, nullable=False),  # the newest, -1 before the first
    Column("version", Integer, nullable=False),  # grows with every change: compare-and-set
    Column("available", Float, nullable=False),  # not to be claimed before
    Column("controller_id", _Id),
    Column("lease_expires", Float),
    Column("cause", String(32)),
    Column("error", Text),
    Column("output", Text),
    Column("created", Float, nullable=False),
    Column("started", Float),
    Column("ended", Float),
    Column("change", BigInteger),  # given when the collector has the span of the terminal state
    Index(
        "rollouts_queue",  # in the order of claims: a claim reads no more rows than it takes
        text("priority DESC"),
        "seq",
        sqlite_where=text("state = 'queued'"),
        postgresql_where=text("state = 'queued'"),
    ),
    Index(
        "rollouts_leases",
        "lease_expires",
        sqlite_where=text("state = 'running'"),
        postgresql_where=text("state = 'running'"),
    ),
    Index("rollouts_run", "run_id", "seq"),
    Index("rollouts_change", "change"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("rollout_id", _Id, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("controller_id", _Id, nullable=False),
    Column("state", String(16), nullable=False),
    Column("cause", String(32)),
    Column("error", Text),
    Column("started", Float, nullable=False),
    Column("ended", Float, nullable=False),
    Column("reported", Text),  # what the controller said: the same again gets the same answer
    Column("answer", Text),
    PrimaryKeyConstraint("rollout_id", "attempt"),
    sqlite_with_rowid=False,
)
"""Attempts that have ended; one that runs is in its rollout's row."""

calls = Table(
    "calls",
    metadata,
    Column("call_id", String(64), primary_key=True),
    Column("rollout_id", _Id, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("digest", String(64), nullable=False),  # of the request's body: tells a retry
    Column("trace_id", String(32), nullable=False),
    Column("span_id", String(16), nullable=False),
    Column("response_id", Text),
    Column("started", Float, nullable=False),
    Column("error", String(64)),  # null: the agent got the answer, and it is in the ledger
    Column("fault", Boolean, nullable=False),  # the error was the engine's or ours, not the agent's
    Index("calls_attempt", "rollout_id", "attempt"),
    sqlite_with_rowid=False,
)
"""The ledger: which calls the collector must have before anything of the attempt is trained."""

rewards = Table(
    "rewards",
    metadata,
    Column("rollout_id", _Id, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("name", String(200), nullable=False),
    Column("call_id", String(64), nullable=False),  # empty: the rollout as a whole
    Column("value", Float, nullable=False),
    PrimaryKeyConstraint("rollout_id", "attempt", "name", "call_id"),
    sqlite_with_rowid=False,
)

outbox = Table(
    "outbox",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    Column("key", Text, nullable=False),  # who waits for it, see `outbox.py`
    Column("finishes", _Id),  # rollout whose terminal state this span tells
    Column("span", LargeBinary, nullable=False),
    Column("taken_by", String(64)),  # the gateway that is sending it, where there are several
)
"""Spans that belong to a committed change and are not yet acknowledged by the collector."""

policies = Table(
    "policies",
    metadata,
    Column("policy", _Id, primary_key=True),
    Column("base_model", Text),
    Column("sampling", Text),  # {"train": {…}, "val": {…}}
    Column("version", BigInteger),  # as the trainer said when it released its last hold
    Column("hold_id", String(64)),
    Column("hold_expires", Float),
)

engines = Table(
    "engines",
    metadata,
    Column("engine_id", _Id, primary_key=True),
    Column("policy", _Id, nullable=False),
    Column("url", Text, nullable=False),
    Column("model", Text),
    Column("token_file", Text),  # the path, never the token
)

replicas = Table(
    "replicas",
    metadata,
    Column("boot_id", String(64), primary_key=True),
    Column("seen", Float, nullable=False),
    Column("holds", Text, nullable=False),
)
"""The gateways on this database, see `replicas.py`."""

counters = Table(
    "counters",
    metadata,
    Column("run_id", _Id, nullable=False),
    Column("name", String(64), nullable=False),
    Column("value", BigInteger, nullable=False),
    PrimaryKeyConstraint("run_id", "name"),
    sqlite_with_rowid=False,
)
