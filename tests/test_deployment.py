"""The Dockerfile and docker-compose.yml: static checks of their text."""

from __future__ import annotations

import configparser
import subprocess
import sys

import pytest
from support.compose import DATA_DIR, MINIQ, ROOT, MissingVariable, compose, image, interpolated

from portalmq.broker.server.config import load_config
from portalmq.transport.transport import bootstrap_addresses

pytestmark = pytest.mark.checkout

SERVICES = compose()["services"]
BROKERS = {name: service for name, service in SERVICES.items() if name.startswith("broker")}
ZOOKEEPERS = {name: service for name, service in SERVICES.items() if name.startswith("zk")}
DEMO = {name: service for name, service in SERVICES.items() if "demo_iot" in str(service.get("entrypoint"))}

# The keys of the compose specification's service that are allowed here.
SERVICE_KEYS = {
    *("image", "build", "command", "entrypoint", "environment", "depends_on", "healthcheck", "ports", "volumes"),
    *("restart", "stop_grace_period", "cap_drop", "security_opt", "read_only", "tmpfs", "mem_limit"),
}
HEALTHCHECK_KEYS = {"test", "interval", "timeout", "retries", "start_period", "disable"}


def test_every_service_is_one_of_the_three_kinds():
    assert len(ZOOKEEPERS) == len(BROKERS) == 3
    assert len(DEMO) >= 2
    assert {*ZOOKEEPERS, *BROKERS, *DEMO} == set(SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_only_known_compose_keys(name):
    service = SERVICES[name]
    assert set(service) <= SERVICE_KEYS
    assert set(service.get("healthcheck", {})) <= HEALTHCHECK_KEYS
    assert all(isinstance(value, str) for value in service.get("environment", {}).values())
    assert isinstance(service.get("command", []), list), "a string would start a shell, which does not pass signals on"


@pytest.mark.parametrize("name", SERVICES)
def test_the_dependencies_of_a_service_exist_and_have_health_checks(name):
    for awaited, how in SERVICES[name].get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"}
        assert awaited in BROKERS or "test" in SERVICES[awaited]["healthcheck"]


def test_dependencies_have_no_cycle():
    def depth(name: str, seen: tuple[str, ...] = ()) -> int:
        assert name not in seen, seen
        return 1 + max((depth(each, (*seen, name)) for each in SERVICES[name].get("depends_on", {})), default=0)

    assert {depth(name) for name in ZOOKEEPERS} == {1}
    assert {depth(name) for name in BROKERS} == {2}
    assert {depth(name) for name in DEMO} == {3}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_more_rights_than_it_needs(name):
    service = SERVICES[name]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    if name not in ZOOKEEPERS:
        assert (service["cap_drop"], service["read_only"], service["tmpfs"]) == (["ALL"], True, ["/tmp"])


def test_ports_are_open_on_this_machine_only():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == len(BROKERS)
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_durable_data_is_on_named_volumes():
    volumes = [volume for service in SERVICES.values() for volume in service.get("volumes", [])]
    named = [volume.partition(":")[0] for volume in volumes]
    assert sorted(named) == sorted(compose()["volumes"]), "each volume is declared, and no two services share one"
    assert all(f"{DATA_DIR}" in str(broker["volumes"]) for broker in BROKERS.values())
    assert all({"/data", "/datalog"} == {v.partition(":")[2] for v in zk["volumes"]} for zk in ZOOKEEPERS.values())


@pytest.mark.parametrize("name", BROKERS)
def test_a_brokers_environment_has_only_known_settings(name):
    environment = image().environment | BROKERS[name]["environment"]
    config = load_config({}, environ=environment)
    assert config.url == f"http://{name}:{config.port}"
    assert BROKERS[name]["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    assert str(config.broker_id) == name.removeprefix("broker")
    assert str(config.data_directory) == DATA_DIR
    hosts, _, chroot = config.zookeeper.partition("/")
    assert hosts.split(",") == [f"{zk}:2181" for zk in ZOOKEEPERS]
    assert chroot
    unknown = {key for key in environment if key.startswith("PORTALMQ_") and key[9:].lower() not in dir(config)}
    assert unknown == set()


def test_zookeepers_agree_about_their_ensemble():
    members = {zk: service["environment"]["ZOO_SERVERS"].split() for zk, service in ZOOKEEPERS.items()}
    assert len({tuple(each) for each in members.values()}) == 1
    for zk, service in ZOOKEEPERS.items():
        number = service["environment"]["ZOO_MY_ID"]
        assert zk == f"zk{number}"
        assert f"server.{number}={zk}:2888:3888;2181" in members[zk]


def test_sensors_and_controllers_know_every_broker():
    wanted = {broker["environment"]["PORTALMQ_ADVERTISED_URL"] for broker in BROKERS.values()}
    for service in DEMO.values():
        assert {address.url for address in bootstrap_addresses(service["environment"]["PORTALMQ_URL"])} == wanted


def test_the_image_holds_all_that_the_package_is_made_of():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    rooms = {line.split(" = ")[1].partition("/")[0] for line in setup["options"]["package_dir"].strip().splitlines()}
    copied = {
        path
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for path in line.split()[1:-1]
    }
    assert copied == {*rooms, "setup.cfg", "pyproject.toml", "README.md", "LICENSE"}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sent == copied


def test_the_image_is_the_one_that_compose_builds_and_runs():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert {service["image"] for service in {**BROKERS, **DEMO}.values()} == {
        f"portalmq:{setup['metadata']['version']}"
    }
    assert {service["build"] for service in BROKERS.values()} == {"."}


def test_the_broker_is_process_one_and_no_root():
    assert image().entrypoint == ["portalmq"]
    assert image().user not in {"root", "0"}


class TestMiniQ:
    """docs/deploy/compose.miniq.yml."""

    service = compose(MINIQ)["services"]["miniq"]

    def test_it_has_only_known_compose_keys(self):
        assert set(self.service) <= SERVICE_KEYS
        assert list(compose(MINIQ)["services"]) == ["miniq"]
        assert (ROOT / MINIQ).parent.joinpath(self.service["build"]).resolve() == ROOT, "built from this checkout"
        assert self.service["image"] == BROKERS["broker1"]["image"]

    def test_it_is_at_port_9000_of_this_machine(self):
        assert self.service["ports"] == [f"127.0.0.1:9000:{image().environment['PORTALMQ_PORT']}"]

    def test_its_messages_are_on_a_volume(self):
        (volume,) = self.service["volumes"]
        assert volume.partition(":")[::2] == (*compose(MINIQ)["volumes"], DATA_DIR)

    def settings(self, **variables: str):
        told = image().environment | self.service["environment"]
        return load_config({}, environ={name: interpolated(value, variables) for name, value in told.items()})

    def test_a_secret_is_required_and_used(self):
        assert self.settings(MINIQ_SECRET="s3cret").secret == "s3cret"
        with pytest.raises(MissingVariable, match="choose a secret"):
            self.settings()

    @pytest.mark.parametrize(("given", "mode"), [({}, False), ({"MINIQ_NO_CONFIRM": "true"}, True)])
    def test_confirmation_is_on_unless_turned_off(self, given: dict[str, str], mode: bool):
        assert self.settings(MINIQ_SECRET="s", **given).no_confirm is mode


def test_every_dependency_has_a_lowest_version_and_the_pipeline_tries_it():
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    wanted = {line for text in lists for line in text.split("\n") if line and not line.startswith("%")}
    program = ROOT / ".ci" / "lowest.py"
    said = subprocess.run(
        [sys.executable, program, ROOT / "setup.cfg"], capture_output=True, text=True, check=True, timeout=60
    )
    assert set(said.stdout.split()) == {line.partition(";")[0].replace(">=", "==") for line in wanted}
