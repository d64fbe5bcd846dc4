"""The description of the API, and a page that shows it: openapi-explorer, in vendored/."""

from __future__ import annotations

from functools import cache
from importlib import resources

from flask import Response, request

from portalmq.broker.api.dispatch import check_caller
from portalmq.broker.api.request_context import RequestContext, accepts, current
from portalmq.errors import Unauthorized

SIGN_IN = "/ui/login?next=/docs"  # of the dashboard
EXPLORER = "openapi-explorer.js"
# The explorer sets styles of its own, so this page allows them. Nothing comes from elsewhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">
<title>PortalMQ HTTP API</title>
<script type="module" src="/docs/{EXPLORER}"></script>
</head>
<body>
<openapi-explorer spec-url="/openapi.json" hide-server-selection="true" hide-defaults="false">
</openapi-explorer>
</body>
</html>
"""


def openapi(context: RequestContext) -> Response:
    """Describe this API in OpenAPI 3.1."""
    return _kept(Response(context.description(), content_type="application/json"))


def page(context: RequestContext) -> Response:
    """Show the description of this API, and try its calls. Without a needed token, send browsers to the sign-in."""
    try:
        check_caller(context, current())
    except Unauthorized:
        if not accepts("text/html"):
            raise
        return Response(status=303, headers={"Location": SIGN_IN, "Cache-Control": "no-store"})
    return _kept(_guarded(Response(PAGE, content_type="text/html; charset=utf-8")))


def explorer(context: RequestContext) -> Response:
    """Return the script of the page."""
    return _kept(_guarded(Response(_explorer(), content_type="text/javascript; charset=utf-8")))


@cache
def _explorer() -> bytes:
    return (resources.files(__package__) / "vendored" / EXPLORER).read_bytes()


def _guarded(response: Response) -> Response:
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    return response


def _kept(response: Response) -> Response:
    """Return the answer with an ETag; 304 for a client that has it already."""
    response.headers["Cache-Control"] = "no-cache"
    response.add_etag()
    response.make_conditional(request)
    return response
