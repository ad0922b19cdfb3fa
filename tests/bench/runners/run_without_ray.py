"""A prefill and a decode worker in processes of their own behind the front door, without Ray: how soon they answer.

Run from the checkout.
"""

import http.client
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lines import serve

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from router.config import RouterConfig
from tests.support.front_door import FrontDoor
from tests.support.local_cluster import LocalCluster

SETTINGS = {
    "backend": "native", "dtype": "q4", "kv_dtype": "bf16", "block_tokens": 32, "num_blocks": 512,
    "max_context_tokens": 8192,
}  # fmt: skip
NAME = "test-model"
"""As the workers of LocalCluster are called."""


class WithoutRay:
    def load(self, model: str) -> dict[str, Any]:
        """Ready to answer."""
        stack = ExitStack()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(folder, Path(model), **SETTINGS))
        door = stack.enter_context(FrontDoor(RouterConfig(model_id=NAME, model_path=model), cluster.ring))
        door.set_workers(cluster.endpoints)
        door.wait_ready(len(cluster.workers))
        self._stack, self._port = stack, door.port
        return {"version": "this checkout"}

    def do_answer(self) -> dict[str, Any]:
        """One token through HTTP, prefill and decode."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        body = json.dumps({"model": NAME, "prompt": [5, 6, 7], "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return dict(json.loads(connection.getresponse().read()))

    def do_close(self) -> dict[str, Any]:
        """The workers have ended in order."""
        self._stack.close()
        return {}


serve(WithoutRay())
