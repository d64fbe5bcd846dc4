"""The parts of a worker without a broker: registration, decoding, metrics, health, files that change."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import pytest
from click.testing import CliRunner

from portalmq import App, Message, Reject, Retry
from portalmq.cli.worker import worker
from portalmq.worker.calls import Call, call_in_thread
from portalmq.worker.counts import BUCKETS_S, Counter, ProcessState, prometheus
from portalmq.worker.decoding import arguments_of
from portalmq.worker.health import HealthServer, answer
from portalmq.worker.outcomes import DELAY_S_MAX, HandlerTimeout
from portalmq.worker.process import AppNotFound, load_app
from portalmq.worker.reload import SourceWatch


def message(value: bytes = b"1", content_type: str = "application/json") -> Message:
    return Message("t", 0, 7, None, value, {}, content_type, 0, delivery_count=1, receipt="r")


# --- registration ----------------------------------------------------------------------------------------------------


def handle(message: Message) -> None: ...


async def handle_async(message: Message) -> None: ...


class Callable_:
    async def __call__(self, message: Message) -> None: ...


@pytest.mark.parametrize(
    ("function", "is_async"),
    [
        *((handle, False), (handle_async, True), (partial(handle), False), (partial(handle_async), True)),
        *((Callable_(), True), (lambda message: None, False)),
    ],
)
def test_functions_of_all_kinds_are_handlers(function: Callable[..., Any], is_async: bool) -> None:
    app = App()
    assert app.handler("t")(function) is function
    assert app.handlers[0].is_async is is_async


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"concurrency": 0}, "concurrency must be 1 to 1000"),
        ({"concurrency": 1001}, "concurrency must be 1 to 1000"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"visibility_timeout_s": 0.5}, "visibility_timeout_s must be 1 to"),
        ({"max_deliveries": 0}, "settings of group 'g'"),
        ({"retry_backoff_s": ()}, "settings of group 'g'"),
        ({"retry_backoff_s": -1}, "settings of group 'g'"),
        ({"ordering": "odd"}, "settings of group 'g'"),
        ({"mode": "stream"}, "queue groups"),
    ],
)
def test_bad_values_are_refused_at_registration(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        App().handler("t", group="g", **arguments)


def test_a_setting_that_no_group_has_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no setting max_deliverys: docs/SETTINGS\.md"):
        App().handler("t", max_deliverys=3)


def test_topics_must_be_named() -> None:
    with pytest.raises(TypeError, match="name the topics"):
        App().handler()
    with pytest.raises(TypeError, match="name the topics"):
        App().handler(handle)  # type: ignore[arg-type]


def test_two_handlers_may_not_compete_for_a_topic() -> None:
    app = App()
    app.handler("a", "b", group="g")(handle)
    app.handler("a", group="other")(handle)
    app.handler("c", group="g")(handle)
    with pytest.raises(ValueError, match="both handle topic 'b' in group 'g'"):
        app.handler("b", group="g")(handle)


def test_two_handlers_may_not_set_their_group_differently() -> None:
    app = App()
    app.handler("a", group="g", max_deliveries=3, ordering="key")(handle)
    app.handler("b", group="g", max_deliveries=3)(handle)
    with pytest.raises(ValueError, match="set max_deliveries of group 'g' differently"):
        app.handler("c", group="g", max_deliveries=4)(handle)


def test_an_app_refuses_unknown_options() -> None:
    with pytest.raises(TypeError, match="tokens"):
        App(tokens="secret")


def test_one_back_off_may_be_a_number() -> None:
    app = App()
    app.handler("t", retry_backoff_s=1.5)(handle)
    assert app.handlers[0].settings == {"retry_backoff_ms": [1500]}


@pytest.mark.parametrize("delay_s", [-1, DELAY_S_MAX + 1, float("nan"), float("inf")])
def test_a_retry_has_a_possible_delay(delay_s: float) -> None:
    with pytest.raises(ValueError, match="a retry waits"):
        Retry(delay_s)


# --- decoding --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Place:
    x: int
    y: int = 0


class Point(msgspec.Struct):
    x: int


class Row(TypedDict):
    x: int


class Model:
    """As a pydantic model, as far as the worker knows it."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    @classmethod
    def model_validate_json(cls, text: bytes) -> Model:
        if not text.startswith(b"{"):
            raise ValueError("1 validation error for Model")
        return cls(text)


def of_dataclass(place: Place) -> None: ...
def of_struct(point: Point) -> None: ...
def of_dict(row: Row) -> None: ...
def of_list(places: list[Place]) -> None: ...
def of_model(model: Model) -> None: ...
def of_bytes(value: bytes) -> None: ...
def of_text(value: str) -> None: ...
def of_number(value: int) -> None: ...
def of_either(value: int | None) -> None: ...
def of_any(value: Any) -> None: ...
def of_nothing(value) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("function", "value", "argument"),
    [
        (of_dataclass, b'{"x": 1}', Place(1, 0)),
        (of_struct, b'{"x": 1}', Point(1)),
        (of_dict, b'{"x": 1}', {"x": 1}),
        (of_list, b'[{"x": 1}, {"x": 2, "y": 3}]', [Place(1), Place(2, 3)]),
        (of_bytes, b"\xff\x00", b"\xff\x00"),
        (of_text, "größer".encode(), "größer"),
        (of_number, b"12", 12),
        (of_either, b"null", None),
        (of_any, b'[1, "a"]', [1, "a"]),
    ],
)
def test_a_payload_is_decoded_by_the_annotation(function: Callable[..., None], value: bytes, argument: object) -> None:
    assert arguments_of(function)(message(value)) == (argument,)


def test_without_an_annotation_the_parameter_is_the_message() -> None:
    each = message()
    for function in (of_nothing, handle, lambda message: None):
        assert arguments_of(function)(each) == (each,)


def test_a_pydantic_model_decodes_itself() -> None:
    (model,) = arguments_of(of_model)(message(b"{}"))
    assert model.text == b"{}"
    with pytest.raises(Reject, match="1 validation error"):
        arguments_of(of_model)(message(b"[]"))


@pytest.mark.parametrize(
    ("function", "value", "reason"),
    [
        (of_dataclass, b"[]", "the payload is not Place: Expected `object`, got `array`"),
        (of_struct, b'{"x": "1"}', r"the payload is not Point: Expected `int`, got `str` - at `\$.x`"),
        (of_number, b"nonsense", "the payload is not int: JSON is malformed"),
        (of_number, b"", "the payload is not int: Input data was truncated"),
        (of_text, b"\xff", "the payload is not text"),
    ],
)
def test_another_payload_is_rejected(function: Callable[..., None], value: bytes, reason: str) -> None:
    with pytest.raises(Reject, match=reason):
        arguments_of(function)(message(value))


def test_a_second_parameter_is_the_message() -> None:
    each = message(b'{"x": 1}')

    def both(point: Point, message: Message) -> None: ...
    def untyped(point: Point, message) -> None: ...  # type: ignore[no-untyped-def]
    def with_default(point: Point, retries: int = 3) -> None: ...

    assert arguments_of(both)(each) == (Point(1), each)
    assert arguments_of(untyped)(each) == (Point(1), each)
    assert arguments_of(with_default)(each) == (Point(1),)


def test_functions_that_cannot_be_called_so_are_refused() -> None:
    def none() -> None: ...
    def three(a: int, b: Message, c: int) -> None: ...
    def keyword(*, message: Message) -> None: ...
    def second(a: int, b: int) -> None: ...
    def unknown(a: Unheard) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for function in (none, three, keyword):
        with pytest.raises(TypeError, match="must take one parameter, or two"):
            arguments_of(function)
    with pytest.raises(TypeError, match="annotate it as Message"):
        arguments_of(second)
    with pytest.raises(TypeError, match="Unheard"):
        arguments_of(unknown)


def test_a_type_that_json_cannot_give_is_refused_at_registration() -> None:
    def odd(value: dict[float, int] | list[int] | set[int]) -> None: ...

    with pytest.raises(TypeError, match="cannot be decoded"):
        arguments_of(odd)


# --- interruption ----------------------------------------------------------------------------------------------------


def call_of(function: Callable[..., object]) -> Call:
    app = App()
    app.handler("t", timeout_s=5)(function)
    return Call(app.handlers[0], message(), 0.0)


def test_an_interruption_never_reaches_the_next_call() -> None:
    """Interrupts calls at the moment when they end, over and over."""
    calls: list[Call] = []
    done = threading.Event()
    leaks: list[BaseException] = []
    verdicts: list[str] = []

    def short(message: Message) -> None:
        sum(range(50))

    def work() -> None:
        try:
            for _ in range(2_000):
                call = call_of_kept()
                calls.append(call)
                verdicts.append(call_in_thread(call).outcome)
                sum(range(20))
        except BaseException as leak:  # noqa: BLE001 - what the test is about
            leaks.append(leak)
        finally:
            done.set()

    app = App()
    app.handler("t", timeout_s=5)(short)

    def call_of_kept() -> Call:
        return Call(app.handlers[0], message(), 0.0)

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        if calls:
            calls[-1].interrupt()
    thread.join()
    assert leaks == []
    assert len(verdicts) == 2_000
    assert set(verdicts) <= {"acked", "timeout"}


def test_a_call_is_interrupted_once() -> None:
    begun, count = threading.Event(), [0]

    def stubborn(message: Message) -> None:
        try:
            begun.set()
            while True:
                sum(range(100))
        except HandlerTimeout:
            count[0] += 1

    call = call_of(stubborn)
    outcome: list[str] = []
    thread = threading.Thread(target=lambda: outcome.append(call_in_thread(call).outcome))
    thread.start()
    assert begun.wait(30)
    for _ in range(10):
        call.interrupt()
    thread.join(30)
    assert (count, outcome) == ([1], ["acked"]), "it ended on its own: that counts"


# --- metrics and health ----------------------------------------------------------------------------------------------


def state(process: int = 0, *, is_ready: bool = True, fault: str = "") -> ProcessState:
    counter = Counter('say "hi"', "g\\1", 4)
    counter.set_fault(fault)
    for seconds in (0.001, 0.3, 1000.0):
        counter.began()
        counter.ended(seconds)
    counter.began()
    counter.count("acked", 3)
    return ProcessState(process, is_ready, False, [counter.now()])


def test_metrics_are_prometheus_text() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    families = {each.name: each for each in parser.text_string_to_metric_families(prometheus([state(0), state(1)]))}
    samples = families["portalmq_worker_messages"].samples
    acked = [each for each in samples if each.labels["outcome"] == "acked"]
    assert [(each.labels["process"], each.labels["handler"], each.value) for each in acked] == [
        *(("0", 'say "hi"', 3.0), ("1", 'say "hi"', 3.0)),
    ]
    histogram = [each for each in families["portalmq_worker_handling_seconds"].samples if each.labels["process"] == "0"]
    buckets = {each.labels["le"]: each.value for each in histogram if each.name.endswith("_bucket")}
    assert (buckets["0.005"], buckets["0.5"], buckets["300.0"], buckets["+Inf"]) == (1, 2, 2, 3)
    assert len(buckets) == len(BUCKETS_S) + 1
    assert families["portalmq_worker_running"].samples[0].value == 1


def test_health_needs_all_processes_and_readiness_all_handlers() -> None:
    good, faulty = state(0), state(1, is_ready=False, fault="Forbidden: no")
    assert answer("/healthz", [good], 2)[0] == 503
    assert answer("/healthz", [good, faulty], 2)[0] == 200
    assert answer("/readyz?x=1", [good, good], 2)[0] == 200
    status, _, body = answer("/readyz", [good, faulty], 2)
    assert (status, msgspec.json.decode(body)["faults"]) == (503, ['say "hi": Forbidden: no'])
    assert answer("/", [], 1)[0] == 404


def test_the_port_serves_them() -> None:
    with HealthServer("127.0.0.1", 0, lambda: ([state()], 1)) as server:
        url = f"http://127.0.0.1:{server.port}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as got:
            assert got.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert b"portalmq_worker_messages_total" in got.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/other", timeout=30)


def test_a_taken_port_is_an_error() -> None:
    with HealthServer("127.0.0.1", 0, lambda: ([], 1)) as server, pytest.raises(OSError, match="in use"):
        HealthServer("127.0.0.1", server.port, lambda: ([], 1))


# --- files and apps --------------------------------------------------------------------------------------------------


def test_changed_new_and_deleted_files_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text("1")
    (tmp_path / ".venv").mkdir()
    watch = SourceWatch([tmp_path])
    assert watch.changed() == []
    os.utime(tmp_path / "a.py", ns=(1, 1))
    (tmp_path / "c.py").write_text("1")
    (tmp_path / "sub" / "b.py").unlink()
    (tmp_path / ".venv" / "d.py").write_text("1")
    (tmp_path / "notes.txt").write_text("1")
    assert watch.changed() == [str(tmp_path / each) for each in ("a.py", "c.py", "sub/b.py")]
    assert watch.changed() == []


def test_a_bounded_number_of_files_is_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(5):
        (tmp_path / f"{number}.py").write_text("1")
    watch = SourceWatch([tmp_path], files_max=2)
    (tmp_path / "4.py").unlink()
    assert watch.changed() == []
    assert "only the first 2" in caplog.text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of the test; what it adds to sys.path is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("nowhere_a:app", None, "there is no module 'nowhere_a'"),
        ("broken_b:app", "import nothing_like_it", "No module named 'nothing_like_it'"),
        ("broken_c:app", "1/0", "ZeroDivisionError"),
        ("empty_d", "", "has no 'app'"),
        ("other_e:x", "x = 3", "is a int, and no portalmq.App"),
        ("bare_f:app", "from portalmq import App\napp = App()", "has no handlers"),
        (":app", None, "names no module"),
    ],
)
def test_an_app_that_cannot_be_loaded_says_why(folder: Path, name: str, content: str | None, why: str) -> None:
    if content is not None:
        (folder / f"{name.partition(':')[0]}.py").write_text(content)
    with pytest.raises(AppNotFound, match=why):
        load_app(name)


@pytest.mark.parametrize(
    ("number", "option", "why"),
    [
        (1, "max_deliveries=0", "the settings of group 'default': Expected `int` >= 1"),
        (2, "nosuch=0", "a group has no setting nosuch"),
        (3, "concurrency=0", "concurrency must be 1 to 1000"),
    ],
)
def test_a_wrong_option_of_a_handler_is_one_line_with_its_place(
    folder: Path, number: int, option: str, why: str
) -> None:
    file = folder / f"refused_{number}.py"
    file.write_text(f"from portalmq import App\napp = App()\n@app.handler('t', {option})\ndef f(message): ...\n")
    with pytest.raises(AppNotFound) as refused:
        load_app(f"refused_{number}:app")
    assert str(refused.value).startswith(f"{file}, line 3: {why}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("number", "arguments", "why"),
    [
        (1, "'foo bar'", "'foo bar' names no host"),
        (2, "'http://localhost:99999'", "'http://localhost:99999': a port is a number from 1 to 65535"),
        (3, "'http://localhost:nine'", "'http://localhost:nine': a port is a number from 1 to 65535"),
        (4, "tls_ca='/nonexistent'", "tls_ca: /nonexistent is no file with certificates"),
        (5, "5", "'int' object is not iterable"),
    ],
)
def test_an_app_whose_brokers_are_misnamed_is_refused_in_one_line(
    folder: Path, number: int, arguments: str, why: str
) -> None:
    text = f"from portalmq import App\napp = App({arguments})\n@app.handler('t')\ndef f(message): ...\n"
    (folder / f"misnamed_{number}.py").write_text(text)
    refused = CliRunner().invoke(worker, [f"misnamed_{number}:app"])
    assert refused.exit_code == 2, refused.exception
    assert refused.stderr.startswith(f"portalmq: misnamed_{number}:app cannot reach its brokers: {why}")
    assert refused.stderr.count("\n") == 1


def test_an_app_may_be_an_attribute_of_an_attribute(folder: Path) -> None:
    (folder / "nested_g.py").write_text(
        "from portalmq import App\nclass Shop:\n    app = App()\n@Shop.app.handler('t')\ndef f(message): ...\n"
    )
    assert load_app("nested_g:Shop.app").handlers[0].name == "f"
