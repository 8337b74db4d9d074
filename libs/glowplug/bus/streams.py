"""Configure the three JetStream streams and their durable readers."""

from collections.abc import Sequence

from nats.js import api

from glowplug.bus.port import MAX_DELIVER
from glowplug.events import subjects

ACK_WAIT_S = 4.0  # for a command held by a killed reader
MAX_ACK_PENDING = 256
COMMANDS_MAX_AGE_S = 60.0
FACTS_MAX_AGE_S = 24 * 3600.0
DUPLICATE_WINDOW_S = 60.0
FACTS_MAX_BYTES = 256 * 1024 * 1024
COMMANDS_MAX_BYTES = 64 * 1024 * 1024
USAGE_MAX_AGE_S = 7 * 24 * 3600.0  # longest absence of a console
# Records take about 450 bytes. The server reserves all streams' bytes, and those of the requested one again, from
# max_file_store (1 GB in deploy/docker/nats.conf).
USAGE_MAX_BYTES = 256 * 1024 * 1024
CONSUMER_INACTIVE_S = 3600.0


def stream_configs(replicas: int) -> list[api.StreamConfig]:
    """Facts, commands, usage. Old facts and usage are discarded; commands expire, as late ones are wrong."""
    return [
        api.StreamConfig(
            name=name,
            subjects=[filter_],
            storage=api.StorageType.FILE,
            retention=api.RetentionPolicy.LIMITS,
            discard=api.DiscardPolicy.OLD,
            max_age=max_age_s,
            max_bytes=max_bytes,
            duplicate_window=DUPLICATE_WINDOW_S,
            num_replicas=replicas,
        )
        for name, filter_, max_age_s, max_bytes in (
            (subjects.FACTS_STREAM, subjects.FACTS, FACTS_MAX_AGE_S, FACTS_MAX_BYTES),
            (subjects.COMMANDS_STREAM, subjects.COMMANDS_ALL, COMMANDS_MAX_AGE_S, COMMANDS_MAX_BYTES),
            (subjects.USAGE_STREAM, subjects.USAGE, USAGE_MAX_AGE_S, USAGE_MAX_BYTES),
        )
    ]


def stream_of(filters: Sequence[str]) -> str:
    return subjects.stream_of(filters[0])


def consumer_config(durable: str, filters: Sequence[str], *, patient: bool = False) -> api.ConsumerConfig:
    """New readers start at the beginning for commands (which may be theirs) or if `patient`, else at the end. Patient
    readers get an event until they acknowledge it, and keep their place."""
    is_commands = stream_of(filters) == subjects.COMMANDS_STREAM
    # The server checks permissions on the subject of this call, which names the reader and its only filter.
    wanted = {"filter_subject": filters[0]} if len(filters) == 1 else {"filter_subjects": list(filters)}
    return api.ConsumerConfig(
        name=durable,
        durable_name=durable,
        **wanted,
        deliver_policy=api.DeliverPolicy.ALL if is_commands or patient else api.DeliverPolicy.NEW,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        max_deliver=-1 if patient else MAX_DELIVER,
        max_ack_pending=MAX_ACK_PENDING,
        inactive_threshold=None if patient else CONSUMER_INACTIVE_S,
    )
