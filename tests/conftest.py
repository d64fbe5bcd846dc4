"""What tests of several rooms share."""

from support.zookeeper import zookeeper_server

__all__ = ["zookeeper_server"]
