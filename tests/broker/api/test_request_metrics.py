"""Requests are counted by the template of their route, so that unknown paths create no series."""

from __future__ import annotations


def test_requests_are_counted_by_template(client, broker):
    client.get("/v1/topics/some-topic")
    client.post("/v1/topics/another/messages", data=b"x")
    client.get("/wp-admin/setup.php")
    text = client.get("/metrics").get_data(as_text=True)
    count = "portalmq_request_duration_seconds_count"
    assert f'{count}{{method="GET",route="/v1/topics/<topic>",status="404"}} 1.0' in text
    assert f'{count}{{method="POST",route="/v1/topics/<topic>/messages",status="200"}} 1.0' in text
    assert f'{count}{{method="any",route="unknown",status="404"}} 1.0' in text
    assert "wp-admin" not in text
    assert "some-topic" not in text


def test_metrics_have_their_content_type(client):
    assert client.get("/metrics").content_type == "text/plain; version=0.0.4; charset=utf-8"
