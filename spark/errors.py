"""Errors of reading and writing. Each text says what to do.

    SourceError
    +-- BadOption       an option that is unknown, missing, or makes no sense
    +-- NothingThere    no such directory, topic or partition
    |   +-- NoTopic     the directory or cluster is readable, and lacks a selected topic
    +-- DamagedFile     a file that is torn, foreign, or lacks messages
    +-- NotReadable     a file or directory without read permission
    +-- DataLoss        messages to be read are gone (retention, purge, a topic created again)
    +-- Unreachable     no broker answers, or none answers properly
    +-- BadRow          a row that cannot be a message
    +-- NotWritten      rows that the brokers refused

They reach the user as text inside Spark's own exceptions.
"""

from __future__ import annotations


class SourceError(Exception):
    """The request cannot be read or written."""


class BadOption(SourceError, ValueError):
    """An option is unknown, missing, or makes no sense."""


class NothingThere(SourceError):
    """There is no such directory, topic or partition."""


class NoTopic(NothingThere):
    """The directory or cluster is readable, and lacks a selected topic. For a stream this means: deleted."""


class DamagedFile(SourceError):
    """A file is torn, foreign, or lacks messages."""

    def __init__(self, path: object, what: str) -> None:
        super().__init__(
            f"{path}: {what}. It was left as it is. Name the data directory of another replica as well (path takes"
            " several, separated by commas): its copy is read instead; a broker that is started on the damaged file"
            " rebuilds it from the leader"
        )
        self.path = str(path)
        self.what = what

    def __reduce__(self) -> tuple[type[DamagedFile], tuple[str, str]]:
        return DamagedFile, (self.path, self.what)


class NotReadable(SourceError):
    """A file or directory without read permission."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"{path} may not be read by this user: run Spark as the broker's user, or as a member of the group that the"
            " files belong to, or name a copy"
        )
        self.path = str(path)

    def __reduce__(self) -> tuple[type[NotReadable], tuple[str]]:
        return NotReadable, (self.path,)


class Unreachable(SourceError):
    """No broker answers, or none answers properly."""


class DataLoss(SourceError):
    """Messages to be read are gone. `resume_at` is the offset where messages may exist again."""

    def __init__(self, what: str, resume_at: int | None = None) -> None:
        super().__init__(f"{what}. With failOnDataLoss=false the query goes on with what is there")
        self.what = what
        self.resume_at = resume_at

    def __reduce__(self) -> tuple[type[DataLoss], tuple[str, int | None]]:
        return DataLoss, (self.what, self.resume_at)


class BadRow(SourceError, ValueError):
    """A row that cannot be a message."""


class NotWritten(SourceError):
    """Rows that the brokers refused."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(
            f"rows for {where} were not taken: {why}. Those before them may be in the topic; when Spark runs this task"
            " again, each is written once"
        )
        self.where = where
        self.why = why

    def __reduce__(self) -> tuple[type[NotWritten], tuple[str, str]]:
        return NotWritten, (self.where, self.why)
