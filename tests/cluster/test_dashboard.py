"""The dashboard in Chromium, as its users see it."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.broker_process import BrokerProcess
from support.chromium import Chromium
from support.cluster import Cluster
from support.pages import Pages, chromium_program

from portalmq import Consumer, Producer
from portalmq.cli.main import main

pytestmark = pytest.mark.timeout(300)

TOKEN, READER = "a-token-that-may-do-everything", "a-token-that-may-look"
EVIL = "<img src=x onerror=window.evil=1><script>window.evil=1</script>\"';${evil}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(chromium_program(), tmp_path_factory.mktemp("chromium")) as made:
        yield made


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with two tokens, of which one may only read."""
    directory = tmp_path_factory.mktemp("broker")
    (directory / "tokens").write_text(TOKEN)
    (directory / "readers").write_text(READER)
    options = ("--token-file", str(directory / "tokens"), "--read-token-file", str(directory / "readers"))
    with BrokerProcess(directory, *options, command=("dev",)) as running:
        yield running


def call(broker: BrokerProcess, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
    request = urllib.request.Request(
        broker.url + path,
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def produce(broker: BrokerProcess, topic: str, *messages: dict[str, Any]) -> None:
    path = f"/v1/topics/{topic}/messages"
    call(broker, "POST", path, {"messages": messages}, "application/vnd.portalmq.batch+json")


@pytest.fixture
def pages(browser: Chromium, broker: BrokerProcess) -> Pages:
    return Pages(browser, broker.url)


def sign_in(pages: Pages, token: str = TOKEN, path: str = "/ui/") -> None:
    pages.open("/ui/login?next=" + path)
    pages.fill("#token", token)
    pages.ask("document.querySelector('form').submit()")
    pages.wait_at(path)


class TestSignIn:
    def test_a_page_asks_for_a_token_and_goes_on_where_it_was_opened(self, pages: Pages) -> None:
        pages.ask("1")
        pages.open("/ui/topics?sort=rate")
        pages.wait_at("/ui/login?next=/ui/topics%3Fsort%3Drate")
        pages.fill("#token", "wrong")
        pages.ask("document.querySelector('form').submit()")
        pages.wait_at("/ui/login")
        pages.see("This broker does not know that token.")
        pages.fill("#token", TOKEN)
        pages.ask("document.querySelector('form').submit()")
        pages.wait_at("/ui/topics?sort=rate")
        pages.see("busiest first")
        assert pages.ask("document.cookie") == "", "scripts cannot read the session"

    def test_signing_out_ends_it(self, pages: Pages) -> None:
        sign_in(pages)
        pages.press("Sign out")
        pages.wait_at("/ui/login")
        assert pages.ask("fetch('/v1/topics').then((answer) => answer.status)") == 401

    def test_a_token_that_may_only_look(self, pages: Pages, broker: BrokerProcess) -> None:
        produce(broker, "looked-at", {"value": 1})
        sign_in(pages, READER, "/ui/topics/looked-at?tab=settings")
        pages.see("read-only")
        assert pages.until("[...document.querySelectorAll('main .card button')].every((each) => each.disabled)")
        refused = "fetch('/v1/topics/looked-at', {method: 'DELETE'}).then((answer) => answer.status)"
        assert pages.ask(refused) == 403, "the API refuses, whatever the page shows"
        assert pages.ask("fetch('/v1/topics/looked-at').then((answer) => answer.status)") == 200


class Elsewhere(BaseHTTPRequestHandler):
    """A page of another origin: the same host, another port, so that browsers send it the cookies of the broker."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>elsewhere</title>")

    def log_message(self, format: str, *arguments: Any) -> None: ...


def test_a_page_of_another_origin_changes_nothing(pages: Pages, broker: BrokerProcess) -> None:
    sign_in(pages)
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pages.browser.open(f"http://127.0.0.1:{server.server_address[1]}/")
        for method, path in (("POST", "/v1/topics/stolen/messages"), ("POST", "/ui/logout")):
            options = f"{{method: '{method}', mode: 'no-cors', credentials: 'include', body: 'x'}}"
            assert pages.ask(f"fetch('{broker.url}{path}', {options}).then((answer) => answer.type)") == "opaque"
        server.shutdown()
    assert "stolen" not in {topic["name"] for topic in call(broker, "GET", "/v1/topics")["topics"]}
    pages.open("/ui/")
    pages.see("Sign out")


def test_a_script_in_what_others_send_does_nothing(pages: Pages, broker: BrokerProcess) -> None:
    produce(broker, "evil", {"value": EVIL, "key": EVIL, "headers": {"trace": EVIL}}, {"value": {EVIL: [EVIL]}})
    call(broker, "PUT", "/v1/groups/evil", {"max_deliveries": 1})
    got = call(broker, "POST", "/v1/groups/evil/receive", {"topics": ["evil"], "max_messages": 2, "consumer": EVIL})
    receipts = [message["receipt"] for message in got["messages"]]
    call(broker, "POST", "/v1/groups/evil/nack", {"receipts": receipts, "reason": EVIL})
    ids = [message["id"] for message in got["messages"]]
    sign_in(pages)
    for path in (
        "/ui/topics/evil",
        *(f"/ui/topics/evil/messages/{each}" for each in ids),
        "/ui/dead-letters/evil?topic=evil",
        f"/ui/topics/{urllib.parse.quote(EVIL, safe='')}",
        f"/ui/topics/evil?where={urllib.parse.quote(EVIL)}",
        "/ui/sql?q=" + urllib.parse.quote("SELECT key, value, headers FROM messages WHERE topic = 'evil'"),
    ):
        pages.open(path)
        if "/sql" in path:
            pages.press("Run")
        pages.until("document.querySelector('main').innerText.includes('onerror')")
        assert pages.ask("window.evil === undefined && !document.querySelector('img[src=x]')"), path
        violations = [each for each in pages.browser.seen.complaints if "Content Security Policy" in each]
        assert violations == []


def test_a_seek_shows_first_what_it_would_do(pages: Pages, broker: BrokerProcess) -> None:
    with Producer(broker.url, token=TOKEN) as producer:
        for n in range(20):
            producer.send("audit", {"n": n}).result(timeout=60)
    with Consumer("audit", group="readers", mode="stream", bootstrap=broker.url, token=TOKEN) as consumer:
        seen = 0
        while seen < 20:
            seen += len(consumer.poll(timeout_s=10, max_messages=20))
        consumer.commit()
    before = call(broker, "GET", "/v1/groups/readers/offsets")["offsets"][0]
    assert before["lag"] == 0

    sign_in(pages, path="/ui/groups/readers")
    pages.fill("[data-to] select, select[data-to]", "earliest")
    pages.press("Preview")
    shown = pages.until("document.querySelector('[data-preview] tbody tr')?.innerText")
    assert str(before["committed"]) in shown
    assert call(broker, "GET", "/v1/groups/readers/offsets")["offsets"][0]["lag"] == 0, "a preview changes nothing"
    pages.press("Seek", "[data-preview]")
    pages.see("moved")
    assert call(broker, "GET", "/v1/groups/readers/offsets")["offsets"][0]["lag"] == 20


def test_a_dead_letter_is_found_edited_and_redriven(pages: Pages, broker: BrokerProcess) -> None:
    messages = [{"value": {"order": n, "total": 10 * n}, "key": f"c-{n}"} for n in range(6)]
    produce(broker, "orders", *messages)
    call(broker, "PUT", "/v1/groups/billing", {"max_deliveries": 1})
    got = call(broker, "POST", "/v1/groups/billing/receive", {"topics": ["orders"], "max_messages": 6})["messages"]
    for message in got:
        reason = "card declined" if message["value"]["order"] == 4 else f"timeout after {message['offset']} s"
        call(broker, "POST", "/v1/groups/billing/nack", {"receipts": [message["receipt"]], "reason": reason})

    sign_in(pages, path="/ui/dead-letters")
    pages.follow("/ui/dead-letters/billing")
    pages.see("timeout after … s")
    pages.press_part("card declined", ".reasons")
    pages.until("document.querySelectorAll('main table tbody tr').length === 1")
    pages.press("edit", "main table")
    pages.fill("[data-value]", '{"order": 4, "total": 39}')
    pages.press("Send copy")
    pages.see("appended as")
    sent = call(broker, "GET", "/ui/data/messages?topic=orders&limit=1")["messages"][0]
    assert (sent["value"], sent["key"]) == ({"order": 4, "total": 39}, "c-4")
    assert sent["headers"]["portalmq-copy-of"].startswith("orders/")

    pages.press("Dry run")
    pages.see("1 match")
    pages.press("Redrive those that match")
    pages.see("1 of 1 are delivered again")
    again = call(broker, "POST", "/v1/groups/billing/receive", {"topics": ["orders"], "max_messages": 9})["messages"]
    assert sorted(message["value"]["total"] for message in again) == [39, 40]


# What JavaScript's own JSON would change: a long integer, the order of names, a name twice, an escape, 1.0.
EXACT = '{"id": 9007199254740993, "2": 1.0, "1": "\\u00e9", "1": "b"}'


def newest(broker: BrokerProcess, topic: str) -> bytes:
    """Return the bytes of the newest value, out of the broker's file."""
    found = call(broker, "POST", "/v1/sql", {"query": f"SELECT hex(value) FROM messages WHERE topic = '{topic}'"})
    return bytes.fromhex(found["rows"][-1][0])


def test_what_is_not_edited_is_kept_byte_for_byte(pages: Pages, broker: BrokerProcess) -> None:
    values = {
        "json": (EXACT, "application/json"),
        "word": ('"\\u00e9"', "application/json"),
        "lines": ("a\r\nb", "text/plain"),
    }
    for topic, (value, kind) in values.items():
        value_base64 = base64.b64encode(value.encode()).decode()
        produce(broker, f"exact-{topic}", {"value_base64": value_base64, "content_type": kind, "key": "k"})
    sign_in(pages)
    for topic, (value, _) in values.items():
        [message] = call(broker, "GET", f"/ui/data/messages?topic=exact-{topic}")["messages"]
        pages.open(f"/ui/topics/exact-{topic}/messages/{message['id']}")
        pages.press("Edit and resend")
        pages.until("document.querySelector('[data-value]')?.disabled === false")
        assert pages.ask("document.querySelector('[data-value]').value") == value.replace("\r\n", "\n")
        pages.press("Send copy")
        pages.see("Sent:")
        assert newest(broker, f"exact-{topic}") == value.encode()
        edited = value.replace("b", "c").replace('u00e9"', 'u00e9!"')
        pages.fill("[data-value]", edited.replace("\r\n", "\n"))
        pages.press("Send copy")
        pages.until("document.querySelectorAll('.notes p').length >= 2")
        assert newest(broker, f"exact-{topic}") == edited.encode()
    pages.open("/ui/topics/exact-json")
    shown = json.dumps(edited_json())
    pages.until(f"[...document.querySelectorAll('main td')].some((each) => each.innerText === {shown})")


def edited_json() -> str:
    return EXACT.replace("b", "c").replace('u00e9"', 'u00e9!"')


def test_what_is_published_keeps_its_numbers(pages: Pages, broker: BrokerProcess) -> None:
    produce(broker, "published", {"value": 0})
    sign_in(pages, path="/ui/topics/published?tab=publish")
    pages.fill("form.publish textarea", EXACT)
    pages.press("Publish")
    pages.see("appended as")
    assert newest(broker, "published") == EXACT.encode()
    pages.open("/ui/topics/published?where=" + urllib.parse.quote("value.id=9007199254740993"))
    pages.see("more digits than a page can hold")


def test_what_is_published_is_seen_by_whoever_follows(pages: Pages, broker: BrokerProcess) -> None:
    produce(broker, "followed", {"value": "before"})
    sign_in(pages, path="/ui/topics/followed")
    pages.press("Live tail")
    pages.until("document.querySelector('[data-tail]')?.innerText.includes('before')")
    produce(broker, "followed", {"value": {"celsius": 21.5}, "headers": {"trace": "77"}})
    pages.until("document.querySelector('[data-tail]')?.innerText.includes('celsius')")
    pages.open("/ui/topics/followed?tab=publish")
    pages.fill("form.publish textarea", '{"celsius": 22.5}')
    pages.press("Publish")
    pages.see("appended as")
    pages.open("/ui/topics/followed?where=" + urllib.parse.quote("value.celsius>21 headers.trace=77"))
    pages.until("document.querySelectorAll('main tbody tr').length === 1")
    newest = call(broker, "GET", "/ui/data/messages?topic=followed&limit=1")["messages"][0]
    assert newest["value"] == {"celsius": 22.5}


def test_a_group_is_paused_and_resumed(pages: Pages, broker: BrokerProcess) -> None:
    produce(broker, "held", {"value": 1})
    call(broker, "POST", "/v1/groups/holders/receive", {"topics": ["held"], "max_messages": 1})
    sign_in(pages, path="/ui/groups/holders")
    pages.press("Pause")
    pages.fill("dialog input", "the bank is closed")
    pages.press("Pause", "dialog")
    pages.see(": the bank is closed. Receives wait")
    assert call(broker, "GET", "/v1/groups/holders")["paused"]["reason"] == "the bank is closed"
    pages.press("Resume")
    pages.until("!document.body.innerText.includes('the bank is closed')")
    assert not call(broker, "GET", "/v1/groups/holders").get("paused")


def test_a_schedule_is_created_looked_at_paused_changed_and_deleted(pages: Pages, broker: BrokerProcess) -> None:
    sign_in(pages, path="/ui/schedules")
    pages.press("Create schedule")
    pages.wait_at("/ui/schedules?new=1")
    pages.fill("[name=name]", "report")
    pages.fill("[name=topic]", "reports")
    pages.fill("[name=cron]", "0 25 * * *")
    pages.see("which is no cron line")
    pages.fill("[name=cron]", "*/5 * * * *")
    pages.fill("[name=timezone]", "Europe/Berlin")
    pages.until("document.querySelectorAll('[data-ticks] li').length === 5")
    pages.fill("[name=value]", EXACT)
    pages.see("schedule create report --topic reports --cron '*/5 * * * *' --timezone Europe/Berlin")
    pages.press("Create", "[data-define]")
    pages.wait_at("/ui/schedules/report")
    pages.see("none yet")
    made = call(broker, "GET", "/v1/schedules/report")
    assert (made["cron"], made["timezone"], made["value"]) == ("*/5 * * * *", "Europe/Berlin", json.loads(EXACT))

    pages.press("Pause")
    pages.see("None while it is paused.")
    assert call(broker, "GET", "/v1/schedules/report")["paused"]
    pages.press("Edit")
    pages.wait_at("/ui/schedules/report?edit=1")
    pages.fill("[data-define] select", "every")
    pages.fill("[name=every]", "1s")
    pages.press("Save")
    pages.wait_at("/ui/schedules/report")
    pages.press("Resume")
    pages.until("/ ago/.test(document.querySelector('.stats').innerText)")
    assert newest(broker, "reports") == EXACT.encode(), "what is not edited is kept"
    pages.open("/ui/schedules?search=rep")
    pages.until("/every 1s/.test(document.querySelector('main tbody tr').innerText)")
    pages.follow("/ui/schedules/report")
    pages.press("Delete schedule")
    pages.fill("[data-confirm]", "report")
    pages.press("Delete schedule", "dialog[open]")
    pages.wait_at("/ui/schedules")
    assert "report" not in {each["name"] for each in call(broker, "GET", "/v1/schedules")["schedules"]}


def test_what_destroys_asks_for_the_name(pages: Pages, broker: BrokerProcess) -> None:
    produce(broker, "doomed", {"value": 1})
    sign_in(pages, path="/ui/topics/doomed?tab=settings")
    pages.press("Delete topic")
    pages.fill("[data-confirm]", "doome")
    assert pages.until("document.querySelector('dialog[open] button.danger')?.disabled === true")
    pages.fill("[data-confirm]", "doomed")
    pages.press("Delete topic", "dialog[open]")
    pages.wait_at("/ui/topics")
    assert "doomed" not in {topic["name"] for topic in call(broker, "GET", "/v1/topics")["topics"]}


def test_a_broker_that_stands_still_is_not_shown_as_live(pages: Pages, broker: BrokerProcess) -> None:
    """Its connections stay open and say nothing."""
    sign_in(pages)
    pages.until("document.querySelector('.live').innerText === 'live'")
    broker.worker.suspend()
    try:
        pages.until("document.querySelector('.live').innerText === 'reconnecting'")
        pages.see("This broker does not answer.")
    finally:
        broker.worker.resume()
    pages.until("document.querySelector('.live').innerText === 'live'")


@pytest.mark.parametrize("path", ["/ui/topics/%25", "/ui/topics/%FF", "/ui/%25/%E0%A4%A"])
def test_an_address_that_names_nothing_is_a_page_too(pages: Pages, path: str) -> None:
    sign_in(pages)
    pages.open(path)
    pages.until("document.querySelector('main .alert, main .empty')?.innerText.length > 5")


# What a cell of a query becomes: text that a spreadsheet would run does not begin as a formula, numbers stay numbers.
CELLS = {
    "'=1+1'": "'=1+1",
    "'+cmd'": "'+cmd",
    "'-2+3'": "'-2+3",
    "'@SUM(A1)'": "'@SUM(A1)",
    "char(9) || '=1'": '"\'\t=1"',
    "char(13) || '=1'": '"\'\r=1"',
    "'＝1+1'": "'＝1+1",
    "'=\"a\";=1'": '"\'=""a"";=1"',
    "-12.5": "-12.5",
    "'-12'": "-12",
    "'+1e3'": "+1e3",
    "-9007199254740993": "-9007199254740993",
    "'a-b=c'": "a-b=c",
    "NULL": "",
}


def test_a_cell_of_a_download_is_no_formula_for_a_spreadsheet(pages: Pages) -> None:
    sign_in(pages, path="/ui/sql")
    pages.ask("URL.createObjectURL = (blob) => { window.saved = blob; return '#'; }")
    pages.fill("[data-query]", "SELECT " + ", ".join(f'{each} AS "@{n}"' for n, each in enumerate(CELLS)))
    pages.press("Run")
    pages.press("CSV")
    names, _, row = pages.until("window.saved?.text()").partition("\r\n")
    assert names == ",".join(f"'@{n}" for n in range(len(CELLS)))
    assert row == ",".join(CELLS.values())


# Controls that a screen reader could not name.
WITHOUT_A_NAME = """
[...document.querySelectorAll("button, a, input, select, textarea")]
  .filter((each) => each.offsetParent)
  .filter((each) => !each.innerText.trim() && !each.getAttribute("aria-label") && !each.labels?.length && !each.title)
  .map((each) => each.outerHTML)
"""
# Controls and their labels that lie over each other.
OVERLAPPING = """
[...document.querySelectorAll("main form label, main form button, main .tools > *")].flatMap((each, at, all) =>
  all.slice(at + 1).filter((other) => {
    const [one, two] = [each.getBoundingClientRect(), other.getBoundingClientRect()];
    if (each.contains(other) || other.contains(each) || !one.width || !two.width) return false;
    const inside = Math.min(each.scrollWidth - each.clientWidth, 200);
    const besides = two.left >= one.right + inside - 1 || one.left >= two.right - 1;
    return !besides && one.top < two.bottom - 1 && two.top < one.bottom - 1;
  }).map((other) => each.outerHTML.slice(0, 90) + " over " + other.outerHTML.slice(0, 90)))
"""
PLACES = [
    *("/ui/", "/ui/topics", "/ui/topics/seen", "/ui/topics/seen?tab=partitions", "/ui/topics/seen?tab=publish"),
    *("/ui/topics/seen?tab=settings", "/ui/groups", "/ui/groups/seers", "/ui/dead-letters", "/ui/cluster"),
    *("/ui/dead-letters/seers?topic=seen", "/ui/topics/seen/messages/0-1"),
    *("/ui/schedules", "/ui/schedules?new=1", "/ui/schedules/seer", "/ui/schedules/seer?edit=1"),
    *("/ui/scheduled?topic=seen", "/ui/sql", "/ui/api", "/ui/nowhere"),
]


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_every_page_fits_the_screen_and_has_no_errors(
    pages: Pages, broker: BrokerProcess, width: int, dark: bool
) -> None:
    produce(broker, "seen", {"value": {"text": "x" * 500}, "key": "k" * 200, "headers": {"h": "v" * 300}})
    call(broker, "POST", "/v1/groups/seers/receive", {"topics": ["seen"], "max_messages": 1})
    spec = {"topic": "seen-often", "cron": "0 6 * * 1-5", "timezone": "America/Argentina/ComodRivadavia"}
    call(
        broker, "PUT", "/v1/schedules/seer", {**spec, "value": "v" * 500, "key": "k" * 200, "headers": {"h": "v" * 300}}
    )
    sign_in(pages)
    for path in PLACES:
        pages.open(path, width=width, dark=dark)
        pages.until("document.querySelector('main h1') && !document.querySelector('main [role=status].empty')")
        # A phone widens its window to what it shows: so not innerWidth.
        assert pages.ask("document.documentElement.scrollWidth") <= width, path
        assert pages.ask(OVERLAPPING) == [], path
        assert pages.browser.seen.complaints == [], path
        outside = [each for each in pages.browser.seen.requests if not each.startswith((broker.url, "data:"))]
        assert outside == [], path
        assert pages.ask(WITHOUT_A_NAME) == [], path
        if width == 1280:
            for other in (700, 1920):
                pages.browser.resize(other, 900)
                pages.until(f"innerWidth === {other} && document.documentElement.scrollWidth <= {other}")
                assert pages.ask(OVERLAPPING) == [], (path, other)


SHOWN = "[...document.querySelectorAll('main .same code, main .hint.mono')].map((each) => each.innerText)"
# They go on until they are stopped.
ENDLESS = ("/ui/events", "text/event-stream", "portalmq consume")


def test_what_is_below_a_view_does_the_same(pages: Pages, broker: BrokerProcess, tmp_path: Path) -> None:
    """Each curl and each command of the pages is one that the broker accepts."""
    produce(broker, "same", {"value": {"n": 1}, "key": "k"}, {"value": "later", "delay_ms": 3_600_000})
    call(broker, "POST", "/v1/groups/samers/receive", {"topics": ["same"], "max_messages": 1})
    call(broker, "PUT", "/v1/schedules/same", {"topic": "same-often", "every_ms": 3_600_000, "value": "tick"})
    (tmp_path / "token").write_text(TOKEN)
    sign_in(pages)
    places = (
        *("/ui/", "/ui/topics", "/ui/topics/same", "/ui/topics/same?tail=1", "/ui/topics/same?partition=0&offset=0"),
        *(
            "/ui/topics/same?where=value.n%3D1",
            "/ui/topics/same?at=2026-01-01T00:00:00Z",
            "/ui/topics/same?tab=publish",
        ),
        *("/ui/topics/same?tab=partitions", "/ui/topics/same?tab=settings", "/ui/topics/same/messages/0-1?edit=1"),
        *("/ui/groups", "/ui/groups/samers", "/ui/dead-letters", "/ui/dead-letters/samers?topic=same&where=key%3Dk"),
        *("/ui/scheduled", "/ui/scheduled?topic=same", "/ui/schedules", "/ui/schedules/same", "/ui/cluster", "/ui/sql"),
    )
    seen: set[str] = set()
    for path in places:
        pages.open(path)
        pages.until("document.querySelector('main .same code') && !document.querySelector('main [role=status].empty')")
        commands = [each for each in pages.ask(SHOWN) if each not in seen]
        assert {each.split()[0] for each in commands} <= {"curl", "portalmq", "echo"}, path
        for each in commands:
            if not any(part in each for part in ENDLESS):
                run_shown(each.replace("TOPIC", "same").replace("FILE", str(tmp_path / "token")))
        seen.update(commands)
    assert len(seen) > 40


def test_a_command_is_one_whatever_the_address_says(pages: Pages, broker: BrokerProcess) -> None:
    """Who copies it from a page that somebody linked to runs nothing else."""
    produce(broker, "linked", {"value": 1})
    call(broker, "POST", "/v1/groups/linked/receive", {"topics": ["linked"], "max_messages": 1})
    sign_in(pages)
    more = urllib.parse.quote("1; touch /tmp/x `id` $(id)'", safe="")
    for path in (
        f"/ui/topics/linked?at={more}",
        f"/ui/topics/linked?partition={more}&offset={more}",
        f"/ui/topics/linked?partition={more}&tail=1",
        f"/ui/groups/linked?at={more}",
        f"/ui/sql?q={more}",
    ):
        pages.open(path)
        pages.until("document.querySelector('main .same code')")
        for each in pages.ask(SHOWN):
            lexer = shlex.shlex(each, posix=True, punctuation_chars="();<>|&`")
            lexer.whitespace_split = True
            assert not {";", "`", "(", ")", "$("} & set(lexer), each


def run_shown(shown: str) -> None:
    if shown.startswith("curl"):
        words = [word.replace("$TOKEN", TOKEN) for word in shlex.split(shown)]
        done = subprocess.run([*words, "-sSf"], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (shown, done.stderr)
        return
    sent, _, command = shown.rpartition(" | ")
    given = " ".join(shlex.split(sent)[1:]) + "\n" if sent else None
    result = CliRunner().invoke(main, shlex.split(command)[1:], input=given)
    assert result.exit_code == 0, (shown, result.output)


def test_the_state_of_a_view_is_in_its_address(pages: Pages, broker: BrokerProcess) -> None:
    produce(broker, "kept", {"value": "before"})
    call(broker, "POST", "/v1/groups/keepers/receive", {"topics": ["kept"], "max_messages": 1})
    sign_in(pages, path="/ui/topics/kept")
    pages.press("Live tail")
    pages.wait_at("/ui/topics/kept?tail=1")
    pages.open("/ui/topics/kept?tail=1")
    pages.until("document.querySelector('[data-tail]')?.innerText.includes('before')")
    pages.press("Stop tail")
    pages.wait_at("/ui/topics/kept")
    pages.open("/ui/topics/kept/messages/0-1?edit=1")
    pages.until("document.querySelector('[data-value]')?.disabled === false")
    pages.press("Close")
    pages.wait_at("/ui/topics/kept/messages/0-1")
    at_ms = call(broker, "GET", "/ui/data/messages?topic=kept")["at_ms"]
    moment = datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    pages.open(f"/ui/groups/keepers?at={moment}")
    pages.see("As it was at")
    shown = pages.until("document.querySelector('input[type=datetime-local]')?.value")
    assert pages.ask(f"new Date({json.dumps(shown)}).getTime() === Date.parse({json.dumps(moment)})")
    pages.open("/ui/dead-letters/keepers?topic=kept&where=key%3Dk")
    pages.until("document.querySelector('[data-redrive]') && document.querySelector('[data-search]').value === 'key=k'")


# Note where the focus is, if that shows; return what no key has reached yet.
NOT_REACHED = """(() => {
  const it = document.activeElement;
  it.reached ||= getComputedStyle(it).outlineStyle !== "none";
  return [...document.querySelectorAll("a[href], button, input, select, textarea, [tabindex='0']")]
    .filter((each) => each.checkVisibility() && !each.disabled && !each.closest("dialog:not([open])") && !each.reached)
    .map((each) => each.outerHTML);
})()"""
TABS_MAX = 200
# A dialog has no content once the page knows that it is closed.
CLOSED = "![...document.querySelectorAll('dialog')].some((each) => each.open || each.childElementCount)"
OPENERS = "[...document.querySelectorAll('main [aria-haspopup=dialog]')]"
# What opens a dialog, by page.
DIALOGS = {
    "/ui/topics": ["Create topic"],
    "/ui/topics/keyed?tab=settings": ["Purge messages", "Delete topic"],
    "/ui/groups/keyers?topic=keyed": ["Pause", "Move what is ready", "Delete group"],
    "/ui/dead-letters/keyers?topic=keyed": ["Drop all"],
    "/ui/scheduled?topic=keyed": ["Cancel all", "Run all now", "move"],
    "/ui/schedules/keyed": ["Delete schedule"],
}
KEYS_TO = {
    "o": "/ui/",
    "t": "/ui/topics",
    "g": "/ui/groups",
    "d": "/ui/dead-letters",
    "s": "/ui/scheduled",
    "r": "/ui/schedules",
    "c": "/ui/cluster",
    "q": "/ui/sql",
    "a": "/ui/api",
}


class TestKeys:
    @pytest.fixture(autouse=True)
    def messages(self, pages: Pages, broker: BrokerProcess) -> None:
        """A topic, and a group that has given up one message of it, and has a delayed one before it."""
        produce(broker, "keyed", {"value": 1}, {"value": 2, "delay_ms": 3_600_000})
        call(broker, "PUT", "/v1/groups/keyers", {"max_deliveries": 1})
        got = call(broker, "POST", "/v1/groups/keyers/receive", {"topics": ["keyed"], "max_messages": 1})["messages"]
        call(broker, "POST", "/v1/groups/keyers/nack", {"receipts": [each["receipt"] for each in got], "reason": "no"})
        call(broker, "PUT", "/v1/schedules/keyed", {"topic": "keyed-often", "every_ms": 3_600_000, "value": "tick"})
        sign_in(pages)

    def test_g_and_a_letter_go_to_a_page(self, pages: Pages) -> None:
        pages.open("/ui/")
        pages.until("document.querySelector('main h1')")
        for key, path in KEYS_TO.items():
            pages.browser.press("g")
            pages.browser.press(key)
            pages.wait_at(path)
            pages.until("document.activeElement === document.querySelector('main h1')")

    def test_a_slash_goes_to_the_search_where_letters_are_text(self, pages: Pages) -> None:
        for path in ("/ui/topics", "/ui/topics/keyed", "/ui/groups", "/ui/dead-letters/keyers", "/ui/cluster"):
            pages.open(path)
            pages.until("document.querySelector('[data-search]')")
            pages.browser.press("/")
            assert pages.ask("document.activeElement.matches('[data-search]')"), path
            for key in "gt?":
                pages.browser.press(key)
            assert pages.ask("document.activeElement.value") == "gt?"
            assert pages.ask("location.pathname") == path
            assert pages.ask("document.querySelector('dialog[open]') === null")

    def test_a_query_runs_by_ctrl_and_enter(self, pages: Pages) -> None:
        pages.open("/ui/sql?q=SELECT%20'by'%20||%20'key'")
        pages.until("document.querySelector('[data-query]')")
        pages.ask("document.querySelector('[data-query]').focus()")
        pages.browser.press("Enter", modifiers=2)
        pages.see("bykey")

    def test_a_question_mark_lists_the_keys(self, pages: Pages) -> None:
        pages.open("/ui/topics")
        pages.until("document.querySelector('.switch button')")
        pages.ask("document.querySelector('.switch button').focus()")
        pages.browser.press("?")
        listed = pages.until("document.querySelector('dialog[open] .keys')?.innerText").split()
        assert set(KEYS_TO) | {"/", "?", "Esc"} <= set(listed)
        pages.browser.press("Escape")
        pages.until(f"{CLOSED} && document.activeElement === document.querySelector('.switch button')")
        pages.browser.press("?")
        pages.until("document.querySelector('dialog[open] .keys')")
        pages.browser.press("g")
        pages.browser.press("c")
        pages.wait_at("/ui/cluster")
        pages.until(CLOSED)

    @pytest.mark.parametrize(("path", "names"), DIALOGS.items())
    def test_escape_closes_a_dialog_and_returns_to_what_opened_it(
        self, pages: Pages, path: str, names: list[str]
    ) -> None:
        pages.open(path)
        for name in names:
            pages.until(f"!!(window.opener_ = {OPENERS}.find((each) => each.innerText === {json.dumps(name)}))")
            pages.ask("opener_.focus()")
            pages.browser.press("Enter")
            pages.until("document.querySelector('dialog[open]')?.contains(document.activeElement)")
            pages.browser.press("Escape")
            pages.until(f"{CLOSED} && document.activeElement === opener_")
        assert set(pages.ask(f"{OPENERS}.map((each) => each.innerText)")) == set(names)

    def test_tab_reaches_everything_and_shows_where_it_is(self, pages: Pages) -> None:
        for path in (
            *("/ui/", "/ui/topics", "/ui/topics/keyed", "/ui/topics/keyed?tab=publish", "/ui/groups/keyers"),
            *("/ui/dead-letters/keyers?topic=keyed", "/ui/scheduled?topic=keyed", "/ui/schedules?new=1", "/ui/sql"),
        ):
            pages.open(path)
            pages.until("document.querySelector('main h1') && !document.querySelector('main [role=status].empty')")
            for _ in range(TABS_MAX):
                pages.browser.press("Tab")
                if (left := pages.ask(NOT_REACHED)) == []:
                    break
            assert left == [], path


def test_a_killed_leader_is_marked_while_the_overview_is_open(browser: Chromium, cluster: Cluster, topic: str) -> None:
    cluster.admin().create_topic(topic, partitions=3)
    leader = cluster.wait_for_leader(topic)
    other = next(each for each in cluster.running if each != leader)
    pages = Pages(browser, cluster.brokers[other].url)
    pages.open("/ui/")
    pages.until("document.querySelectorAll('.broker.good').length === 3")
    pages.ask("window.opened = 1")
    cluster.kill(leader)
    pages.until(f"document.querySelector('[data-events]')?.innerText.includes('broker {leader} is gone')")
    pages.until("document.querySelector('[data-events]')?.innerText.includes('fail-over')")
    pages.until("document.querySelectorAll('.broker.bad').length === 1")
    assert pages.ask("window.opened") == 1, "nothing was loaded again"
