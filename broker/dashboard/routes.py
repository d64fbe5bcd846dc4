"""The routes of the dashboard."""

from __future__ import annotations

from portalmq.broker.api.query import Parameters
from portalmq.broker.api.route import Route
from portalmq.broker.dashboard import data, pages, schedules

DASHBOARD_ROUTES = (
    Route("GET", "/ui", pages.home, is_open=True),
    Route("GET", "/ui/", pages.home, is_open=True),
    Route("GET", "/ui/<path:page>", pages.home, is_open=True),
    Route("GET", "/ui/static/<digest>/<path:name>", pages.static, is_open=True, while_starting=True),
    Route("GET", "/ui/login", pages.login_form, is_open=True),
    Route("POST", "/ui/login", pages.login, is_open=True),
    Route("POST", "/ui/logout", pages.logout, is_open=True),
    Route("GET", "/ui/events", data.events, Parameters),
    Route("GET", "/ui/data/minutes", data.minutes, Parameters),
    Route("GET", "/ui/data/topics", data.topics, data.TopicsQuery),
    Route("GET", "/ui/data/groups", data.groups, data.GroupsQuery),
    Route("GET", "/ui/data/groups/<group>", data.group, Parameters),
    Route("GET", "/ui/data/groups/<group>/dead-letters", data.dead_letters, data.ReasonsQuery),
    Route("GET", "/ui/data/schedules", schedules.schedules, schedules.SchedulesQuery),
    Route("GET", "/ui/data/schedules/<schedule>", schedules.schedule, Parameters),
    Route("GET", "/ui/data/ticks", schedules.ticks, schedules.TicksQuery),
    Route("GET", "/ui/data/cluster", data.cluster, data.ClusterQuery),
    Route("GET", "/ui/data/messages", data.messages, data.MessagesQuery),
)
