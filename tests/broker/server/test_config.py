"""Settings: their sources, precedence, and errors."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from portalmq.broker.cluster.exits import UsageError
from portalmq.broker.server.config import READERS, SETTINGS, BrokerConfig, load_config


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_option_beats_the_environment_which_beats_the_file_which_beats_the_default(elsewhere):
    (elsewhere / "portalmq.toml").write_text(
        'host = "::1"\nport = 1\nlog-format = "json"\ndefault_replication_factor = 2\n'
    )
    config = load_config({"port": "3", "host": None}, environ={"PORTALMQ_PORT": "2", "PORTALMQ_LOG_FORMAT": "text"})
    assert (config.port, config.log_format, config.host, config.default_replication_factor) == (3, "text", "::1", 2)
    assert config.keepalive_s == 75


def test_every_setting_can_be_read_from_text():
    for field in fields(BrokerConfig):
        assert str(field.type).removesuffix(" | None") in READERS, field.name


def test_types_are_read_from_the_environment(elsewhere):
    variables = {"PORTALMQ_DATA_DIR": "/x", "PORTALMQ_INSECURE": "yes", "PORTALMQ_DRAIN_TIMEOUT_S": "1.5"}
    config = load_config({}, environ=variables)
    assert (config.data_dir, config.insecure, config.drain_timeout_s) == (Path("/x"), True, 1.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "x"),
        ("PORT", "-1"),
        ("PORT", "65536"),
        ("INSECURE", "maybe"),
        ("LOG_FORMAT", "xml"),
        ("BODY_BYTES_MAX", "5"),
    ]
    + [("DRAIN_TIMEOUT_S", "soon"), ("TLS_CERT", "cert.pem"), ("PARKED_RECEIVES_MAX", "10000")],
)
def test_a_wrong_setting_is_named(elsewhere, name, value):
    with pytest.raises(UsageError, match=name.lower()) as refused:
        load_config({}, environ={f"PORTALMQ_{name}": value})
    assert refused.value.exit_code == 2


def test_a_misspelt_setting_in_the_file_gets_a_hint(elsewhere):
    (elsewhere / "portalmq.toml").write_text('tokn_file = "x"\n')
    with pytest.raises(UsageError, match="did you mean 'token_file'"):
        load_config({}, environ={})


@pytest.mark.parametrize("text", ["port = ", "port = [1]\n", "port = 1.5\n", 'insecure = "perhaps"\n'])
def test_a_broken_file_is_named(elsewhere, text):
    file = elsewhere / "other.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"other\.toml"):
        load_config({}, environ={}, file=file)
    with pytest.raises(UsageError, match=r"missing\.toml"):
        load_config({}, environ={}, file=elsewhere / "missing.toml")


def test_a_table_of_another_command_is_left_alone(elsewhere):
    (elsewhere / "portalmq.toml").write_text("[client]\nanything = 1\n")
    assert load_config({}, environ={}) == BrokerConfig()


def test_the_data_directory_goes_with_the_port():
    assert replace(BrokerConfig(port=0), port=5001).data_directory == Path("data/5001")
    assert BrokerConfig(data_dir=Path("/x")).data_directory == Path("/x")


def test_the_url_is_what_clients_use():
    assert BrokerConfig(port=5001).url == "http://127.0.0.1:5001"
    assert BrokerConfig(host="::1").url == "http://[::1]:5000"
    assert BrokerConfig(tls_cert=Path("c"), tls_key=Path("k")).url == "https://127.0.0.1:5000"
    assert BrokerConfig(advertised_url="http://mq.example/").url == "http://mq.example"


@pytest.mark.parametrize("url", ["http://b", "https://b.example:5000", "http://[::1]:5000", "http://b:5000/portal"])
def test_an_advertised_url_is_kept(elsewhere, url):
    assert load_config({"advertised_url": url}, environ={}).url == url


@pytest.mark.parametrize(
    "url", ["", " ", "b:5000", "ftp://b", "http://", "http://b:99999", "http://b:x", "http://a b", "http://b?x=1"]
)
def test_an_invalid_url_cannot_be_advertised(elsewhere, url):
    with pytest.raises(UsageError, match="advertised_url"):
        load_config({"advertised_url": url}, environ={})


@pytest.mark.parametrize("option", ["secret", "zookeeper_password"])
def test_an_empty_secret_is_refused(elsewhere, option):
    """`--secret "$SECRET"` without the variable would open the broker to everyone."""
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is empty"):
        load_config({option: ""}, environ={})


@pytest.mark.parametrize("scheme", ["http", "ftp"])
def test_a_secret_in_a_url_is_refused_and_not_repeated(elsewhere, scheme):
    with pytest.raises(UsageError, match="no user") as refused:
        load_config({"advertised_url": f"{scheme}://user:hidden@b:1"}, environ={})
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("hosts", ["a:1", "a:1,b:2", "a:1,b:2/chroot/below", "[::1]:2181", "none", "None"])
def test_zookeeper_addresses_are_accepted(elsewhere, hosts):
    config = load_config({"zookeeper": hosts}, environ={})
    assert config.is_clustered is (hosts.lower() != "none")


@pytest.mark.parametrize("hosts", ["a", "a:x", "a:0", "a:70000", ":1", "a:1,", "a:1/", "a:1//x", "a:1/x/"])
def test_an_invalid_zookeeper_address_is_refused(elsewhere, hosts):
    with pytest.raises(UsageError, match="zookeeper"):
        load_config({"zookeeper": hosts}, environ={})


def test_credentials_of_zookeeper_go_together_and_protect_a_chroot(elsewhere):
    both = {"zookeeper_user": "u", "zookeeper_password": "hidden"}
    config = load_config({"zookeeper": "a:1/x", **both}, environ={})
    assert config.zookeeper_auth == ("u", "hidden")
    assert "hidden" not in repr(config)
    assert load_config({"zookeeper": "a:1", "zookeeper_own_root": True, **both}, environ={}).zookeeper == "a:1"
    for wrong in ({"zookeeper": "a:1/x", "zookeeper_user": "u"}, {"zookeeper": "a:1", **both}):
        with pytest.raises(UsageError, match="zookeeper_user"):
            load_config(wrong, environ={})


def test_a_secret_may_come_from_a_file_and_so_stay_out_of_the_list_of_processes(elsewhere):
    (elsewhere / "secret").write_text("hunter2\n")
    for name in ("secret", "zookeeper_password"):
        both = {"zookeeper_user": "u"} if name == "zookeeper_password" else {}
        config = load_config({"zookeeper": "a:1/x", name: "@secret", **both}, environ={})
        assert getattr(config, name) == "hunter2"
        assert "@FILE" in SETTINGS[name].metadata["help"]
    assert load_config({"host": "@x"}, environ={}).host == "@x"
    (elsewhere / "secret").write_text("two\nlines\n")
    for file in ("secret", "missing"):
        with pytest.raises(UsageError, match=f"--secret: {file}"):
            load_config({"secret": f"@{file}"}, environ={})


@pytest.mark.parametrize(
    ("hosts", "local"),
    [("localhost:2181", True), ("127.0.0.1:1,[::1]:2/x", True), ("127.0.0.1:1,zk:2", False), ("10.0.0.1:1/x", False)],
)
def test_a_zookeeper_on_this_machine_alone_is_recognised(elsewhere, hosts, local):
    assert load_config({"zookeeper": hosts}, environ={}).zookeeper_is_local is local
