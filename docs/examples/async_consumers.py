"""Many AsyncConsumers in one event loop: what they cost while they wait, and how soon a message arrives.

    python docs/examples/async_consumers.py 1000
    python docs/examples/async_consumers.py 1000 stream

Consumers of one queue group share the messages; each stream consumer has a group of its own, and reads them all. It
makes a topic at the broker of PORTALMQ_URL (default: http://127.0.0.1:5000; a name would take
threads to resolve). Linux.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import threading
import time

from portalmq import AsyncConsumer, AsyncProducer

TOPIC = f"async-crowd-{os.getpid()}"
IDLE_S = 10.0
ARRIVALS = 200
BEGIN_AT_ONCE = 50


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("VmRSS")]
    return int(line.split()[1])


async def main(count: int, mode: str) -> None:
    came: asyncio.Queue[float] = asyncio.Queue()

    async def consume(consumer: AsyncConsumer) -> None:
        async for message in consumer:
            came.put_nowait(time.perf_counter() - float(message.text))

    async with AsyncProducer() as producer, asyncio.TaskGroup() as tasks:
        await producer.send(TOPIC, str(time.perf_counter()))  # the topic is made at its first use
        before_kib = resident_kib()
        group, readers = (TOPIC, 1) if mode == "queue" else (f"{TOPIC}-{{}}", count)
        consumers = [AsyncConsumer(TOPIC, group=group.format(number), mode=mode) for number in range(count)]
        began = time.perf_counter()
        for number, consumer in enumerate(consumers, 1):
            tasks.create_task(consume(consumer))
            if number % BEGIN_AT_ONCE == 0 and mode == "stream":  # each makes a group and joins it
                for _ in range(BEGIN_AT_ONCE):
                    await came.get()
        for _ in range(1 if mode == "queue" else count % BEGIN_AT_ONCE):
            await came.get()
        await asyncio.sleep(max(IDLE_S / 2, count / 200))  # all are parked by then
        print(f"consumers {count}, threads {threading.active_count()}, after {time.perf_counter() - began:.1f} s")
        print(f"memory    {(resident_kib() - before_kib) / count:.1f} KiB for each consumer")
        busy_s = time.process_time()
        await asyncio.sleep(IDLE_S)
        print(f"idle      {(time.process_time() - busy_s) / IDLE_S:.1%} of a core")
        waits_ms = []
        while len(waits_ms) < ARRIVALS:
            await producer.send(TOPIC, str(time.perf_counter()))
            waits_ms += [await came.get() * 1000 for _ in range(readers)]
        quantiles = statistics.quantiles(waits_ms, n=100)
        print(f"latency   p50 {quantiles[49]:.2f} ms, p99 {quantiles[98]:.2f} ms from send() to the consumer")
        began = time.perf_counter()
        await asyncio.gather(*(consumer.close() for consumer in consumers))
        print(f"closed    in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    os.environ.setdefault("PORTALMQ_URL", "http://127.0.0.1:5000")
    asyncio.run(main(int(sys.argv[1]), *sys.argv[2:] or ["queue"]))
