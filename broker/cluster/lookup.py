"""A call of brokers about a single partition: answered here where that is led, asked of its leader elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from portalmq.broker.cluster.peers import Peers
from portalmq.broker.cluster.rpc import Outcomes, TopicPartition
from portalmq.errors import PortalMQError

T = TypeVar("T")


@dataclass(slots=True)
class Lookup(Generic[T]):
    """Work for `forwarding.Leaders`: `answer` is what this broker would say as the leader; another one is told `call`
    under its `name`, and says a `kind`."""

    name: str
    call: msgspec.Struct
    kind: type[T]
    answer: Callable[[TopicPartition], T]
    peers: Peers
    timeout_s: float

    def here(self, places: Sequence[TopicPartition]) -> Outcomes[T]:
        (place,) = places
        try:
            return {place: self.answer(place)}
        except PortalMQError as error:
            return {place: error}

    def there(self, broker_id: int, places: Sequence[TopicPartition]) -> Outcomes[T]:
        (place,) = places
        return {place: self.peers.call(broker_id, self.name, self.call, self.kind, timeout_s=self.timeout_s)}
