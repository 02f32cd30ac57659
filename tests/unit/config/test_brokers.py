"""Addresses of brokers in the settings."""

import pytest

from worker.config import ConfigError, load


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("kafka:9092", "kafka:9092"),
        (" a.b-c_d:1 , 10.0.0.1:65535", "a.b-c_d:1,10.0.0.1:65535"),
        ("[::1]:9092,[fe80::1%eth0]:9092", "[::1]:9092,[fe80::1%eth0]:9092"),
    ],
)
def test_addresses_are_taken_without_their_spaces(given: str, taken: str) -> None:
    assert load(bootstrap_servers=given).bootstrap_servers == taken


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("http://kafka:9092", "'http://kafka:9092' is a URL"),
        ("a:1,kafka://b:9092", "'kafka://b:9092' is a URL"),
        ("kafka", "'kafka' has no port"),
        ("kafka:", "'kafka:' has no port"),
        ("kafka:0", "a port is a number from 1 to 65535"),
        ("kafka:65536", "a port is a number from 1 to 65535"),
        ("a:1,", "'' is not the address of a broker"),
        ("::1:9092", "'::1:9092' is not the address of a broker"),
        ("ka fka:9092", "'ka fka:9092' is not the address of a broker"),
        ("kafka:\uff11", "is not the address of a broker"),  # a digit, but not ours
    ],
)
def test_another_form_is_named_with_the_right_one(given: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(bootstrap_servers=given)
    assert "KP_BOOTSTRAP_SERVERS=" in str(error.value)
    assert words in str(error.value)
    assert "give host:port, and several with a comma between them" in str(error.value)
