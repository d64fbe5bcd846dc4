"""Browsers' sessions: a cookie made from a token, which alone changes nothing from another origin; and tokens that may
only read."""

from __future__ import annotations

import re

import pytest

from portalmq.broker.api.app import create_app
from portalmq.broker.api.routes import ROUTES
from portalmq.broker.api.sessions import COOKIE, SESSION_S, Sessions, set_cookie
from portalmq.broker.dashboard.routes import DASHBOARD_ROUTES
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.server.auth import Auth, auth_from
from portalmq.broker.server.config import BrokerConfig

HOST = {"Host": "broker.example:5000"}
OURS = {**HOST, "Origin": "http://broker.example:5000", "Sec-Fetch-Site": "same-origin"}
CHANGES = [("POST", "/v1/topics/t/messages"), ("PUT", "/v1/topics/t"), ("POST", "/v1/sql"), ("DELETE", "/v1/groups/g")]


@pytest.fixture
def browser(broker):
    """A client that keeps cookies, as a browser does."""
    auth = Auth(["writes"], ["reads"])
    return create_app(broker, BrokerConfig(), Metrics("0"), auth, pages=DASHBOARD_ROUTES).test_client()


def sign_in(browser, token, **headers):
    return browser.post("/ui/login", data={"token": token, "next": "/ui/topics"}, headers={**OURS, **headers})


class TestSignIn:
    def test_a_page_without_a_session_leads_to_the_sign_in_and_back(self, browser):
        answer = browser.get("/ui/topics/t?tab=browse", headers=HOST)
        assert (answer.status_code, answer.headers["Location"]) == (
            303,
            "/ui/login?next=/ui/topics/t%3Ftab%3Dbrowse",
        )
        form = browser.get(answer.headers["Location"], headers=HOST).text
        assert 'name="next" value="/ui/topics/t?tab=browse"' in form

    def test_a_token_begins_a_session(self, browser):
        answer = sign_in(browser, "writes")
        assert (answer.status_code, answer.headers["Location"]) == (303, "/ui/topics")
        cookie = answer.headers["Set-Cookie"]
        assert re.fullmatch(
            rf"{COOKIE}=\d+\.[0-9a-f]{{64}}; Path=/; Max-Age={SESSION_S}; HttpOnly; SameSite=Strict", cookie
        )
        assert "writes" not in cookie
        assert browser.get("/v1/topics", headers=HOST).status_code == 200

    def test_a_wrong_token_does_not(self, browser, problem_of):
        answer = sign_in(browser, "wrong")
        assert (answer.status_code, "Set-Cookie" in answer.headers) == (401, False)
        assert "does not know that token" in answer.text
        problem_of(browser.get("/v1/topics", headers=HOST), 401, "unauthorized")

    @pytest.mark.parametrize(
        "place", ["https://evil.example/ui/", "//evil.example/ui/", "/v1/topics", "/ui/\\evil", "/ui/\r\nX: y", ""]
    )
    def test_it_leads_nowhere_else(self, browser, place):
        answer = browser.post("/ui/login", data={"token": "writes", "next": place}, headers=OURS)
        assert answer.headers["Location"] == "/ui/"

    def test_a_large_or_strange_form_is_refused(self, browser, problem_of):
        """Anybody may send one: it takes no room from the bodies of clients, and no time."""
        problem_of(sign_in(browser, "x" * 5_000), 413, "message_too_large")
        fields = "&".join(f"token{n}=1" for n in range(20))
        form = {"content_type": "application/x-www-form-urlencoded", "headers": OURS}
        problem_of(browser.post("/ui/login", data=fields, **form), 400, "invalid_request")

    def test_no_other_page_signs_somebody_in_or_out(self, browser, problem_of):
        for foreign in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"}):
            problem_of(sign_in(browser, "writes", **foreign), 403, "forbidden")
            problem_of(browser.post("/ui/logout", headers={**OURS, **foreign}), 403, "forbidden")

    def test_signing_out_ends_the_session(self, browser, problem_of):
        sign_in(browser, "writes")
        answer = browser.post("/ui/logout", headers=OURS)
        assert (answer.status_code, answer.headers["Location"]) == (303, "/ui/login")
        problem_of(browser.get("/v1/topics", headers=HOST), 401, "unauthorized")

    def test_over_tls_the_cookie_is_secure(self):
        assert set_cookie("x", secure=True).endswith("; Secure")

    def test_without_tokens_nobody_is_asked(self, broker):
        client = create_app(broker, BrokerConfig(), Metrics("0"), Auth(), pages=DASHBOARD_ROUTES).test_client()
        assert client.get("/ui/login").headers["Location"] == "/ui/"


class TestSession:
    @pytest.mark.parametrize(("method", "path"), CHANGES)
    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Origin": "http://evil.example"},
            {"Origin": "http://broker.example:6000"},
            {"Origin": "null"},
            {"Origin": "http://broker.example:5000", "Sec-Fetch-Site": "same-site"},
        ],
        ids=str,
    )
    def test_it_changes_nothing_from_elsewhere(self, browser, broker, problem_of, method, path, headers):
        sign_in(browser, "writes")
        problem_of(browser.open(path, method=method, headers={**HOST, **headers}, data=b"{}"), 403, "forbidden")
        assert broker.made == []

    def test_it_changes_things_from_the_brokers_own_page(self, browser, broker):
        broker.logs["t"] = [[]]
        sign_in(browser, "writes")
        sent = browser.post("/v1/topics/t/messages", data=b"x", headers=OURS)
        assert sent.status_code == 200, sent.text

    def test_a_wrong_token_beside_it_is_refused(self, browser, problem_of):
        sign_in(browser, "writes")
        problem_of(browser.get("/v1/topics", headers={**HOST, "Authorization": "Bearer x"}), 401, "unauthorized")


class TestReadOnly:
    @pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
    def test_a_token_that_reads_changes_nothing(self, browser, broker, route, problem_of):
        path = route.path.replace("<topic>", "t").replace("<group>", "g").replace("<partition>", "0")
        answer = browser.open(path, method=route.method, headers={"Authorization": "Bearer reads"}, data=b"{}")
        if route.method == "GET" or route.path == "/v1/fetch":
            assert answer.status_code not in {401, 403}
        else:
            assert "nor run SQL: use a full token" in problem_of(answer, 403, "forbidden")["detail"]
            assert broker.made == []

    def test_nor_does_its_session(self, browser, broker, problem_of):
        sign_in(browser, "reads")
        for method, path in CHANGES:
            problem_of(browser.open(path, method=method, headers=OURS, data=b"{}"), 403, "forbidden")
        assert broker.made == []
        assert browser.get("/v1/topics", headers=HOST).status_code == 200

    def test_the_page_knows(self, browser, broker):
        for token, shown in (("reads", 'data-writes=""'), ("writes", 'data-writes="yes"')):
            sign_in(browser, token)
            assert shown in browser.get("/ui/", headers=HOST).text

    def test_its_file_is_a_setting(self, tmp_path):
        file = tmp_path / "readers"
        file.write_text("only-me\n")
        auth = auth_from(BrokerConfig(host="0.0.0.0", read_token_file=file, insecure_zookeeper=True))
        assert auth.needed
        assert (auth.access("Bearer only-me"), auth.access("Bearer else")) == ("read", None)


class TestValues:
    def test_a_session_ends_by_itself_and_with_its_token(self):
        now = 1_000.0
        digests = [(digest, "all") for digest in Auth(["a", "b"]).digests]
        sessions = Sessions(digests, lambda: now)
        value = sessions.begin(b"b")
        assert value is not None
        assert sessions.access(f"other=1; {COOKIE}={value}") == "all"
        assert Sessions(digests[:1], lambda: now).access(f"{COOKIE}={value}") is None
        assert Sessions(digests, lambda: now + SESSION_S + 1).access(f"{COOKIE}={value}") is None

    def test_nothing_made_up_is_one(self):
        sessions = Sessions([(digest, "all") for digest in Auth(["a"]).digests], lambda: 1_000.0)
        value = sessions.begin(b"a") or ""
        ends, _, signature = value.partition(".")
        for wrong in ("", ".", "1.", f"{int(ends) + 1}.{signature}", f"{ends}.", f"{ends}.{signature[:-1]}", "²." * 9):
            assert sessions.access(f"{COOKIE}={wrong}") is None
        assert sessions.begin(b"") is None
