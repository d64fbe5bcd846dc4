"""`portalmq elect` and `partitions rebalance`: what they say when ZooKeeper does not admit them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from support.failing_plane import FailingPlane

from portalmq.broker.server import preflight
from portalmq.cli.main import main
from portalmq.control_plane.standalone import Standalone


@pytest.mark.parametrize(
    "words", [["elect", "t", "0", "--unclean", "--i-accept-data-loss"], ["partitions", "rebalance"]]
)
def test_a_zookeeper_that_is_kept_for_others_names_the_options_for_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = Standalone(tmp_path)
    plane.start()
    monkeypatch.setattr(preflight, "connected", lambda config: FailingPlane(plane, 0, "refused", for_good=True))
    result = CliRunner().invoke(main, [*words, "--zookeeper", "localhost:2181"])
    assert result.exit_code == 2
    assert "for others" in result.stderr
    assert (
        "--zookeeper-own-root --zookeeper-user portalmq --zookeeper-password @data/cluster/zookeeper.password"
        in result.stderr
    )
