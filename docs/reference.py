"""Write docs/PYTHON.md and docs/SETTINGS.md anew, from docstrings, types and the comments beside settings.

python docs/reference.py           writes both pages
python docs/reference.py --check   exits 1 when a page is not what the code says
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import portalmq
from portalmq import wire
from portalmq.broker.server.config import ENVIRONMENT_PREFIX, SETTINGS
from portalmq.errors import ERRORS_BY_CODE, PortalMQError
from portalmq.producers.batching import SendFuture
from portalmq.sink import TransactionalSink
from portalmq.testing import InMemoryBroker

HERE = Path(__file__).parent
CLASSES = [
    *(getattr(portalmq, name) for name in ("Producer", "RecordMetadata", "Consumer", "Message", "Admin", "Lock")),
    *(portalmq.AsyncProducer, portalmq.AsyncConsumer, SendFuture, TransactionalSink),
    *(portalmq.App, portalmq.Reject, portalmq.Retry, InMemoryBroker),
]
WIDTH = 100

_PYTHON = """\
Made from the docstrings by `python docs/reference.py`. Everything is imported from `portalmq`, but `TransactionalSink`,
which is in `portalmq.sink`, and `InMemoryBroker`, in `portalmq.testing`; a `SendFuture` is what `Producer.send`
returns."""

_SETTINGS = """\
# Settings

Made from the code by `python docs/reference.py`. Times are in ms where a name ends with `_ms`, sizes in bytes.

## Topics

`PUT /v1/topics/{{topic}}` with `config`, `portalmq topic create NAME -c setting=value`, or
`Admin.create_topic(name, config={{…}})`; changed by `PATCH`, `portalmq topic alter` and `Admin.alter_topic`.

{topics}

## Groups

`PUT /v1/groups/{{group}}`, `portalmq group create NAME -c setting=value`, or `Admin.create_group(name, …)`. What each
does stands in [QUEUES.md](QUEUES.md).

{groups}

## Receive

The body of `POST /v1/groups/{{group}}/receive`.

{receive}

## Acknowledgements of a produce

`?acks=` of `POST /v1/topics/{{topic}}/messages`, `Producer(acks=…)`, `portalmq produce --acks`.

| `acks` | Answered when |
| --- | --- |
| `all` (default) | the message is on disk, fsynced, on every replica in sync, and on at least `min_insync_replicas` |
| `leader` | it is on disk, fsynced, on the leader; a fail-over may lose it |
| `none` | it is taken (202, without an offset); anything may lose it |

## Brokers

Options of `portalmq broker` (`--body-bytes-max`), environment variables (`{prefix}BODY_BYTES_MAX`), or keys of
`portalmq.toml` (`body_bytes_max`), in this order.

{brokers}
"""


# --- PYTHON.md -------------------------------------------------------------------------------------------------------


def python() -> str:
    """The Python reference: every public class with its methods."""
    return "\n".join(
        [
            "# Python reference",
            "",
            _PYTHON,
            *(line for cls in CLASSES for line in _class(cls)),
            *_errors(),
            "",
        ]
    )


def _class(cls: type[Any]) -> Iterator[str]:
    yield from ("", f"## {cls.__name__}", "", *_code(cls.__name__, cls), *_prose(cls))
    for name, member in inspect.getmembers(cls):
        if name.startswith("_") or not any(name in vars(base) for base in cls.__mro__ if _is_ours(base)):
            continue
        if isinstance(member, property):
            yield from ("", f"### {cls.__name__}.{name}", "", *_prose(member.fget))
        elif inspect.isfunction(member):
            yield from ("", f"### {cls.__name__}.{name}", "", *_code(name, member), *_prose(member))


def _is_ours(cls: type[Any]) -> bool:
    return cls.__module__.partition(".")[0] == "portalmq"


def _code(name: str, of: Any) -> Iterator[str]:
    """The signature, a parameter a line where it is long."""
    signature = inspect.signature(of)
    shown: list[str] = []
    is_keyword = False
    for each in signature.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not is_keyword:
            shown.append("*")
        is_keyword = is_keyword or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        shown.append(_parameter(each))
    returns = signature.return_annotation
    ending = "" if returns in (signature.empty, None, "None") or inspect.isclass(of) else f" -> {_annotation(returns)}"
    line = f"{name}({', '.join(shown)}){ending}"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {each}," for each in shown), f"){ending}"])
    yield from ("```python", line, "```", "")


def _parameter(of: inspect.Parameter) -> str:
    stars = {of.VAR_POSITIONAL: "*", of.VAR_KEYWORD: "**"}.get(of.kind, "")
    kind = "" if of.annotation is of.empty else f": {_annotation(of.annotation)}"
    value = getattr(of.default, "__name__", repr(of.default))  # of a function its name: its repr has an address
    default = "" if of.default is of.empty else f" = {value}"
    return f"{stars}{of.name}{kind}{default}"


def _annotation(of: Any) -> str:
    """As it stands in the code: annotations are texts, or types where a Struct made the signature."""
    return of if isinstance(of, str) else inspect.formatannotation(of)


def _prose(of: Any) -> Iterator[str]:
    text = inspect.getdoc(of) or ""
    if text:
        yield text


def _errors() -> Iterator[str]:
    yield from ("", "## Errors", "", *_prose(PortalMQError), "")
    yield from ("| Class | `code` | HTTP status | A repeat may help | Meaning |", "| --- | --- | --- | --- | --- |")
    for code, cls in sorted(ERRORS_BY_CODE.items(), key=lambda entry: (entry[1].status, entry[0])):
        helps = "yes" if cls.retryable_by_default else "no"
        yield f"| `{cls.__name__}` | `{code}` | {cls.status} | {helps} | {cls.title} |"


# --- SETTINGS.md -----------------------------------------------------------------------------------------------------


def settings() -> str:
    """Tables of all settings: of topics, groups, receives and brokers."""
    brokers = (
        f"| `{name}` | {_value(setting.default)} | {_cell(setting.metadata['help'])} |"
        for name, setting in SETTINGS.items()
    )
    tables = {
        "topics": _table(wire.TopicConfig),
        "groups": _table(wire.GroupConfig),
        "receive": _table(wire.ReceiveRequest),
        "brokers": ["| Setting | Default | Meaning |", "| --- | --- | --- |", *brokers],
    }
    return _SETTINGS.format(prefix=ENVIRONMENT_PREFIX, **{name: "\n".join(lines) for name, lines in tables.items()})


def _table(of: type[msgspec.Struct]) -> Iterator[str]:
    meanings = _meanings(of)
    yield from ("| Setting | Default | Meaning |", "| --- | --- | --- |")
    for field in msgspec.structs.fields(of):
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory
        shown = "required" if default is msgspec.NODEFAULT else _value(default() if callable(default) else default)
        yield f"| `{field.name}` | {shown} | {_cell(meanings[field.name])} |"


def _meanings(of: type[msgspec.Struct]) -> dict[str, str]:
    """The comment above a field, or behind it. Raises KeyError in `_table` for one without."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in textwrap.dedent(inspect.getsource(of)).splitlines():
        comment = re.fullmatch(r"    # (.*)", line)
        field = re.fullmatch(r"    (\w+): .*?(?:  # (.*))?", line)
        if comment:
            above.append(comment[1])
        elif field and (field[2] or above):
            found[field[1]] = field[2] or " ".join(above)
            above = []
    return found


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return f"`{value if isinstance(value, (str, Path)) else json.dumps(value)}`" if value != "" else "–"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"PYTHON.md": python, "SETTINGS.md": settings}


def main(arguments: list[str]) -> int:
    for name, make in PAGES.items():
        page = make()
        if arguments == ["--check"]:
            if (HERE / name).read_text("utf-8") != page:
                print(f"docs/{name} is not what the code says: run python docs/reference.py", file=sys.stderr)
                return 1
        else:
            (HERE / name).write_text(page, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
