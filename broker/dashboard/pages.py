"""The shell of the pages, their static files, and the sign-in.

The shell is the same for every path below /ui/: the script in it draws what the path names. Static files are in memory,
under a path that has their digest, so browsers keep them until they change.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, quote

from flask import Response, request
from jinja2 import Environment, FileSystemLoader
from werkzeug.exceptions import NotFound

from portalmq.broker.api.body import read_body
from portalmq.broker.api.request_context import RequestContext, current
from portalmq.broker.api.sessions import Access, set_cookie
from portalmq.errors import InvalidRequest

HERE = Path(__file__).parent
HOME = "/ui/"
LOGIN = "/ui/login"
DOCS = "/docs"
POLICY = "default-src 'self'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'; object-src 'none'"
HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)
TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
FORM_BYTES_MAX = 4096
FORM_WITHIN_S = 5.0
COMPRESSED_FROM_BYTES = 1_000


class StaticFile(NamedTuple):
    body: bytes
    compressed: bytes
    content_type: str


@cache
def static_files() -> tuple[str, dict[str, StaticFile]]:
    """Return the digest of all static files, and each by its path."""
    files, digest = {}, hashlib.sha256()
    for file in sorted((HERE / "static").rglob("*")):
        if file.suffix in TYPES:
            body, name = file.read_bytes(), file.relative_to(HERE / "static").as_posix()
            digest.update(f"{name} {len(body)} ".encode() + body)
            files[name] = StaticFile(body, gzip.compress(body, mtime=0), TYPES[file.suffix])
    return digest.hexdigest()[:16], files


@cache
def _templates() -> Environment:
    return Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True)


def home(context: RequestContext, page: str = "") -> Response:
    """Return the shell; without a needed session, send to the sign-in."""
    access = _access(context)
    if access is None:
        place = request.path + (f"?{current().query}" if current().query else "")
        return _see_other(f"{LOGIN}?next={quote(place, safe='/')}")
    shown = {"broker": context.broker, "url": context.config.url}
    return _page("shell.html", **shown, needs_token=context.auth.needed, may_write=access == "all")


def _access(context: RequestContext) -> Access | None:
    if not context.auth.needed:
        context.origin_check.check(current())
        return "all"
    headers = current().headers
    return context.auth.access(headers.get("authorization")) or context.auth.sessions.access(headers.get("cookie", ""))


def static(context: RequestContext, digest: str, name: str) -> Response:
    known, files = static_files()
    file = files.get(name)
    if file is None:
        raise NotFound
    is_small = "gzip" in current().headers.get("accept-encoding", "") and len(file.body) >= COMPRESSED_FROM_BYTES
    response = Response(file.compressed if is_small else file.body, content_type=file.content_type)
    if is_small:
        response.headers["Content-Encoding"] = "gzip"
    response.headers["Vary"] = "Accept-Encoding"
    response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if digest == known else "no-store"
    response.headers.extend(HEADERS)
    return response


# --- the sign-in -----------------------------------------------------------------------------------------------------


def login_form(context: RequestContext) -> Response:
    place = _local(parse_qs(current().query).get("next", [HOME])[0])
    if not context.auth.needed:
        return _see_other(place)
    return _page("login.html", next=place, wrong=False)


def login(context: RequestContext) -> Response:
    """Begin a session with the token of the form."""
    context.origin_check.check_page(current())
    # A body of anybody: small, and apart from the room for those of clients.
    body = read_body(current(), FORM_BYTES_MAX, pause_s=FORM_WITHIN_S)
    try:
        form = parse_qs(body.decode("utf-8", "replace"), max_num_fields=10)
    except ValueError:
        raise InvalidRequest("a sign-in has the fields token and next") from None
    place = _local(form.get("next", [HOME])[0])
    session = context.auth.sessions.begin(form.get("token", [""])[0].strip().encode("utf-8"))
    if session is None:
        response = _page("login.html", next=place, wrong=True)
        response.status_code = 401
        return response
    response = _see_other(place)
    response.headers["Set-Cookie"] = set_cookie(session, secure=request.scheme == "https")
    return response


def logout(context: RequestContext) -> Response:
    context.origin_check.check_page(current())
    response = _see_other(LOGIN)
    response.headers["Set-Cookie"] = set_cookie("", secure=request.scheme == "https")
    response.headers["Clear-Site-Data"] = '"cache"'
    return response


def _local(place: str) -> str:
    """Return the path that was asked for, if it is one of the dashboard, or the description of the API."""
    is_known = place == DOCS or place.startswith(HOME)
    return place if is_known and "\\" not in place and place.isprintable() else HOME


def _see_other(place: str) -> Response:
    response = Response("", 303, content_type="text/plain")
    response.headers["Location"] = place
    response.headers["Cache-Control"] = "no-store"
    return response


def _page(template: str, **values: object) -> Response:
    text = (
        _templates()
        .get_template(template)
        .render(static=f"/ui/static/{static_files()[0]}", version=version("portalmq"), **values)
    )
    response = Response(text, content_type="text/html; charset=utf-8")
    response.headers.extend(HEADERS)
    response.headers["Cache-Control"] = "no-store"
    return response
