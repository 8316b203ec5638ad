import socket

import pytest

from services.standalone.ports import LOOPBACK, free_ports, require_free
from shared.errors import ConfigurationError


def test_free_ports_are_different_and_can_be_listened_on():
    ports = free_ports(8)
    assert len(set(ports)) == 8
    for port in ports:
        require_free("inference_hub.port", LOOPBACK, port)


def test_taken_port_is_a_sentence_with_key_value_and_remedy():
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"inference_hub\.port must be a free port.*{port}.*inference_hub\.port=0"):
            require_free("inference_hub.port", LOOPBACK, port)
        with pytest.raises(ConfigurationError, match=r"or pass --set redis.url=redis://127.0.0.1:0/0 to have one chosen"):
            require_free("the port of redis.url", LOOPBACK, port, to_choose="redis.url=redis://127.0.0.1:0/0")
