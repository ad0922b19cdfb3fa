"""One replica in a process of its own, without Ray: `python -m tests.support.worker_process CONFIG_JSON`.

Prints its endpoint as one JSON line, then obeys JSON lines on stdin: {"sources": [[incarnation, host, port], ...]}.
Ends at end of file, so that it never outlives the test that started it.
"""

import asyncio
import json
import sys
from dataclasses import asdict

from kv_transfer.channel import KVSource
from workers.replica.config import ReplicaConfig
from workers.replica.leader import Leader


async def main(config: ReplicaConfig) -> None:
    leader = Leader(config)
    endpoint = await leader.start()
    print(json.dumps(asdict(endpoint)), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        leader.set_sources([KVSource(*source) for source in command["sources"]])
    await leader.drain()
    await leader.stop()
    leader.engine.check_integrity()


if __name__ == "__main__":
    asyncio.run(main(ReplicaConfig(**json.loads(sys.argv[1]))))
