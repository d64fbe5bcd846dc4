from __future__ import annotations

collect_ignore_glob: list[str] = []
try:
    import kombu  # noqa: F401
except ImportError:  # without the extra `celery` there is nothing to test
    collect_ignore_glob = ["test_*.py"]
