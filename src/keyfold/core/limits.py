"""Every bound of the product in one place, named with its unit; each is a setting `limits.NAME`."""

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1, le=2**31)]


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds that protect the server from its callers, and the store from the server."""

    body_bytes_max: Annotated[Count, Meta(description="largest request body")] = 8 * 1024 * 1024
    batch_items_max: Annotated[Count, Meta(description="most items in one request")] = 10_000
    depth_max: Annotated[Count, Meta(description="deepest nesting of a JSON body")] = 32
    key_bytes_max: Annotated[Count, Meta(description="longest key, in UTF-8 bytes")] = 512
    message_bytes_max: Annotated[Count, Meta(description="largest payload of one message")] = 900_000

    connections_max: Annotated[Count, Meta(description="most open HTTP connections; further ones wait")] = 1_024
    silence_seconds_max: Annotated[
        Count, Meta(description="longest a connection may be silent before the whole head of a request is there")
    ] = 30
    request_seconds_max: Annotated[Count, Meta(description="longest a request may take before it gets 503")] = 30
    requests_per_second_max: Annotated[Count, Meta(description="requests a second of one token")] = 20_000
    refusals_per_second_max: Annotated[Count, Meta(description="failed authentications a second of one address")] = 50

    gather_wait_milliseconds_max: Annotated[
        int, Meta(ge=0, le=1_000, description="longest a request waits for others to share its transaction")
    ] = 2
    gather_items_max: Annotated[Count, Meta(description="most items in one gathered transaction")] = 10_000
    gather_queue_max: Annotated[Count, Meta(description="requests waiting for one operation before 503")] = 10_000

    transaction_tries_max: Annotated[Count, Meta(description="tries of one transaction before 503")] = 12
    transaction_seconds_max: Annotated[Count, Meta(description="longest one transaction may run")] = 60
    lock_seconds_max: Annotated[Count, Meta(description="longest wait for a lock of the store")] = 10

    message_tries_max: Annotated[Count, Meta(description="tries of one message before it is set aside")] = 3
    parked_keys_max: Annotated[
        Count, Meta(description="keys waiting behind poison messages of one partition before it stops")
    ] = 1_000
    relay_batch_max: Annotated[Count, Meta(description="most messages in one relay step")] = 2_000
    consumer_batch_max: Annotated[Count, Meta(description="most messages in one consumer step")] = 50_000
    consumer_batch_milliseconds: Annotated[
        Count, Meta(description="a consumer step of many messages that took longer is followed by smaller ones")
    ] = 500
    purge_rows_max: Annotated[Count, Meta(description="most rows removed in one purge step")] = 5_000

    def __post_init__(self) -> None:
        if self.lock_seconds_max > self.transaction_seconds_max:
            raise ValueError("lock_seconds_max must not exceed transaction_seconds_max")
        if self.gather_items_max < self.batch_items_max // 10:
            raise ValueError("gather_items_max must be at least a tenth of batch_items_max")
        if self.message_bytes_max > self.body_bytes_max:
            raise ValueError("message_bytes_max must not exceed body_bytes_max")
