"""The files of topics on this broker that are removed or moved aside.

Nothing is destroyed without authority: a folder is removed only when the control plane says by name and id that its
topic was deleted. A folder of an unknown topic is moved to lost+found and kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import gevent
from gevent.lock import BoundedSemaphore

from portalmq.broker.cluster.replicas import Files
from portalmq.broker.cluster.topic import TopicsHost
from portalmq.broker.storage.errors import Shortage, StorageError
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.plane import PlaneError
from portalmq.errors import PortalMQError

log = logging.getLogger(__name__)

# How often the search for files of unknown topics is repeated while the control plane is unavailable.
STRAYS_AGAIN_S = 5.0


class TopicFiles:
    """`known` are the ids of the topics that this broker knows, and of those that it is still closing; `on_changed` is
    called after a removal."""

    def __init__(
        self,
        host: TopicsHost,
        catalog: Catalog,
        files: Files,
        *,
        known: tuple[Collection[str], ...],
        on_changed: Callable[[], None],
    ) -> None:
        self.closed = False
        self._host = host
        self._catalog = catalog
        self._files = files
        self._removing: set[str] = set()
        self._known = (*known, self._removing)
        self._on_changed = on_changed
        self._strays_lock = BoundedSemaphore()

    def exist(self, topic_id: str) -> bool:
        """Whether any file of the topic is on this broker's disk."""
        return self._is_known(topic_id) or self._files.exist(topic_id)

    def remove(self, topic_id: str) -> None:
        """Remove the files of a topic with a tombstone. For a topic that is still closing this runs again later."""
        if not self.closed and not self._is_known(topic_id):
            self._removing.add(topic_id)
            gevent.spawn(self._remove, topic_id)

    def _is_known(self, topic_id: str) -> bool:
        return any(topic_id in ids for ids in self._known)

    def _remove(self, topic_id: str) -> None:
        try:
            self._host.pool.apply(self._files.remove, (topic_id,))
        except Shortage as error:
            log.warning("files of a deleted topic stay until the next start: %s", error)
        except StorageError as fault:
            self._host.storage_failed(fault)
        finally:
            self._removing.discard(topic_id)
            self._on_changed()

    def look_for_strays(self) -> None:
        """Look for files of unknown topics once, as soon as the control plane can be read."""
        while not self.closed and not self.set_aside_strays():
            gevent.sleep(STRAYS_AGAIN_S)

    def set_aside_strays(self) -> bool:
        """Move files of unknown topics to lost+found. A topic is known by the control plane, read after a sync, or by
        a tombstone. Return False while the control plane cannot be read, with nothing touched, or the disk is full."""
        with self._strays_lock:
            try:
                folders = self._host.pool.apply(self._files.folders)
                self._catalog.plane.sync()
                explained = self._catalog.topic_ids()
                deleted = set(self._catalog.tombstones())
                explained = explained.union(*self._known)
                self._host.pool.apply(self._files.clean_up, (folders, explained, deleted))
            except (PlaneError, PortalMQError, Shortage) as error:
                log.info("files of unknown topics cannot be looked for now: %s", error)
                return False
            except StorageError as fault:
                self._host.storage_failed(fault)
            return True
