"""Django's tasks on PortalMQ: a backend of `django.tasks`, and the worker command `portalmq_worker`.

    TASKS = {"default": {"BACKEND": "portalmq.django.TaskBackend", "OPTIONS": {"bootstrap": ["http://localhost:5000"]}}}

docs/DJANGO.md is the manual. Django is imported at the first use of the backend, since INSTALLED_APPS names this
package before Django is ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portalmq.django.backend import TaskBackend as TaskBackend

__all__ = ["TaskBackend"]


def __getattr__(name: str) -> Any:
    if name != "TaskBackend":
        raise AttributeError(f"module 'portalmq.django' has no attribute {name!r}")
    from portalmq.django.backend import TaskBackend

    return TaskBackend
