"""The older queues' protocols, on a broker in this process."""

from __future__ import annotations

from flask.testing import FlaskClient
from support.domain import Fixture

from portalmq.broker.api.app import create_app
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.protocols.routes import PROTOCOL_ROUTES
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig


def client_of(fixture: Fixture, *secrets: str, **settings: object) -> FlaskClient:
    config = BrokerConfig(**settings)  # type: ignore[arg-type]
    return create_app(fixture.broker, config, Metrics("0"), Auth(secrets), more=PROTOCOL_ROUTES).test_client()
