"""The Django application, which brings the worker command."""

from __future__ import annotations

from django.apps import AppConfig


class PortalMQConfig(AppConfig):
    name = "portalmq.django"
    label = "portalmq"
    verbose_name = "PortalMQ"
