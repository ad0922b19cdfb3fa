"""What `cluster.loopback` relies on in the pinned Ray. The listeners themselves are listed in tests/ray."""

import inspect

import pytest

from cluster.loopback import loopback_address, move_replica_listener


def test_only_the_address_of_all_interfaces_is_moved():
    assert loopback_address("[::]:0") == "127.0.0.1:0"
    assert loopback_address("[::]:8123") == "127.0.0.1:8123"
    assert loopback_address("10.0.0.7:0") == "10.0.0.7:0"


@pytest.mark.ray
def test_ray_binds_the_replica_server_through_the_name_we_replace(monkeypatch):
    from ray.serve._private import replica

    source = inspect.getsource(replica.Replica._on_initialized)
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in source
    asked = []
    monkeypatch.setattr(replica, "add_port_to_grpc_server", lambda server, address: asked.append(address) or 1234)
    move_replica_listener()
    move_replica_listener()
    assert replica.add_port_to_grpc_server(None, "[::]:0") == 1234
    assert asked == ["127.0.0.1:0"]
