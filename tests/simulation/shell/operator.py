"""An operator of a run, who restores a control plane that was lost from the disks, as `portalmq adopt` does."""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from simulation.shell.checker import TOPIC
from simulation.shell.loop import Process
from simulation.shell.plane import SimPlane

from portalmq.broker.cluster.exits import EX_STORAGE
from portalmq.broker.server import adoption, adoption_reading
from portalmq.broker.server.adoption import NotAdopted
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.plane import PlaneError

if TYPE_CHECKING:
    from simulation.shell.checker import Key
    from simulation.shell.world import World

CLUSTER = "simulated"
OUTPUTS = "out"


def adopt(world: World, random: Random, damaged: Collection[int], key: Key | None = None) -> None:
    """End all brokers, lose all that ZooKeeper has, damage a file on these machines, and adopt the directories. With
    `key` that is the last segment of this partition.

    Where messages may be lost, the operator is asked, and declines: then the run ends in ruins.
    """
    power = random if random.random() < 0.5 else None
    for machine in world.machines.values():
        machine.end(again_s=0.5, power=power)
        machine.set_clock(0)
    world.is_adopting = True
    world.zookeeper.lose_everything()
    for known in world.checker.partitions.values():
        known.state = None
    world.checker.history.forget_locks(world.loop.now_ns)
    if not world.checker.history.has_delivered:
        world.checker.history.paused_ns = None  # the group is in the control plane alone
    if world.checker.history.limits is not None:
        world.checker.history.limits.lift()
    world.loop.spawn(Process("operator"), _adopt, world, random, damaged, key)


def _adopt(world: World, random: Random, damaged: Collection[int], key: Key | None) -> None:
    paths: dict[str, Any] = {}
    for machine in world.machines.values():
        if (disk := machine.read_disk()) is None:
            continue  # it never ran
        if machine.number in damaged and key is None:
            world.faults.damage(machine, disk, random)
        elif machine.number in damaged and key is not None and world.faults.behead(machine, disk, key, random):
            world.reached["damaged before an adoption"] += 1
        identity = SimpleNamespace(cluster_id=CLUSTER, broker_id=machine.number, store_uuid=machine.store_uuid)
        paths[disk.root.name] = SimpleNamespace(path=disk.root, identity=identity)
    adoption_reading._opened = lambda path, stack: paths[path.name]  # type: ignore[assignment]
    while world.is_adopting:
        plane = SimPlane(world, world.loop.current, world.options.session_s)
        try:
            plane.start()
            found = adoption_reading.read_directories([each.path for each in paths.values()])
            world.checker.read_by_adoption(found.replicas)
            for said in adoption.write_back(Catalog(plane), found, accept_loss=False, replace_cluster=True):
                world.note("operator", "{}", said)
            world.reached["adopted"] += 1
            for topic_id in found.undescribed:  # a partition that no disk has a file of is no partition any more
                if (topic := found.topics[topic_id]).name == TOPIC:
                    world.checker.partitions_least = min(world.checker.partitions_least, topic.partitions)
                    world.checker.history.partitions = min(world.checker.history.partitions, topic.partitions)
            if all(topic.name != OUTPUTS for topic in found.topics.values()):
                world.checker.history.forget_outputs()  # the topic was new, and on no disk yet
            world.is_doubtful |= bool(damaged)
            world.is_adopting = False
        except NotAdopted as refusal:
            world.note("operator", "does not adopt: {}", refusal)
            if refusal.exit_code == EX_STORAGE and world.faults.make_room():
                continue
            world.reached["not adopted"] += 1
            world.is_ruined = True
            return
        except PlaneError as fault:
            world.note("operator", "will try again: {}", fault)
            world.loop.wait(0.2)
        finally:
            plane.close()
