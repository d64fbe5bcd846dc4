"""The report's page: its content, its limits, and its appearance in Chromium if there is one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import chromium, reports

from portalmq.spark.report import page, plots, words
from portalmq.spark.report.axes import Linear, Logarithmic, Times
from portalmq.spark.report.markup import Markup, element
from portalmq.spark.report.model import Deliveries, FailOver, LatencyBucket, Quantiles, Report, SizeBucket, TopicFigures
from portalmq.spark.report.view import changes_of_leaders

SECTIONS = ("throughput", "partitions", "sizes", "producers", "latency", "redeliveries", "lag", "leaders")
EVIL = "\"><img src=x onerror=alert(1)></script><script>alert('two')</script>&amp;"


class Reading(HTMLParser):
    """The elements of a page and its text; anything unbalanced fails."""

    VOID = ("meta", "link", "br", "img", "hr")

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in {"script", "style"}:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def read(report: Report) -> Reading:
    return Reading(page.html(report))


class TestWhatItSays:
    def test_every_section_is_there_and_linked(self) -> None:
        found = read(reports.demo())
        assert tuple(section["id"] for section in found.all("section")) == SECTIONS
        assert [link["href"] for link in found.all("a")][1:] == [f"#{name}" for name in SECTIONS]

    def test_figures_are_formatted_for_people(self) -> None:
        report = reports.demo()
        found = read(report).words
        assert f"{report.totals.messages:,} messages in 35.9 s" in found
        assert f"{report.totals.messages_per_s:,.0f}/s" in found
        assert "22 Nov 2026, 00:21:47 to 00:22:22 UTC" in found
        told = re.search(r"controllers got half within (\S+) ms, 99 % within (\S+) ms", found)
        assert told is not None
        # At most the largest value of its topics in the table below; the classes of the plot end at 8 and 64.
        waits = [group.latency_ms for group in report.groups if group.latency_ms is not None]
        assert 0 < float(told[1]) <= min(8, max(wait.p50 for wait in waits) + 0.5)
        assert 0 < float(told[2]) <= min(64, max(wait.p99 for wait in waits) + 0.5)
        assert "6 changes of leaders; the longest pause took 570 ms" in found
        assert "Nothing waits" in found

    def test_the_table_behind_a_plot_has_the_rates_of_every_bucket(self) -> None:
        report = reports.made({"a": 1, "b": 2}, seconds=3, leader_dies=False)
        found = read(report).words
        for point in report.throughput:
            assert f"{point.messages:,}" in found
        assert "00:21:47" in found
        assert "00:21:49" in found

    def test_an_empty_report_says_so_in_each_section(self) -> None:
        found = read(reports.nothing())
        assert "No messages yet" in found.words
        assert len([p for p in found.all("p") if p.get("class") == "nothing"]) == len(SECTIONS)
        assert "no group has read yet" in found.words.lower()
        assert found.all("svg") == []

    def test_a_report_of_messages_without_consumers(self) -> None:
        found = read(reports.made({"a": 1}, groups={})).words
        assert "No group has read yet, so there is no latency to show." in found
        assert "No group has read yet, so nothing waits for one." in found

    def test_a_report_of_one_message(self) -> None:
        totals = msgspec.structs.replace(
            reports.nothing().totals, messages=1, bytes=5, topics=1, partitions=1, first_ms=9, last_ms=9
        )
        topic = TopicFigures("a", 1, 1, 5, 0, 9, 9, 1.0, 1.0, Quantiles(5, 5, 5, 5, 5), 1.0)
        report = msgspec.structs.replace(
            reports.nothing(), totals=totals, topics=[topic], sizes=[SizeBucket("a", 4, 8, 1)]
        )
        found = read(report).words
        assert "1 message at once" in found
        assert "All messages have 4–7 B" in found

    def test_the_page_says_how_many_entries_the_lists_leave_out(self) -> None:
        found = read(reports.biggest()).words
        assert "31 topics more: all are in the Parquet files" in found
        assert "1,200 partitions more" in found
        assert "70 others" in found

    def test_lag_names_the_group_and_its_age(self) -> None:
        found = read(reports.made({"orders": 3}, groups={"fast": "queue", "slow": "queue"})).words
        assert "slow is 111 messages behind on orders" in found
        assert "8.4 s" in found

    def test_thousands_of_redeliveries_are_few_columns(self) -> None:
        made = reports.made({"orders": 3}, groups={"g": "queue"})
        many = [Deliveries("g", "orders", number, 1) for number in range(1, 5_001)]
        cut = msgspec.structs.replace(made, deliveries=many[:500], left_out={"deliveries": 4_500})
        for report, times in ((msgspec.structs.replace(made, deliveries=many), "5,000"), (cut, "at least 500")):
            found = page.html(report)
            assert f"was handed out {times} times" in found
            assert "24th or later delivery" in found
            assert "25th delivery" not in found

    def test_the_first_epoch_of_a_partition_is_no_fail_over(self) -> None:
        epochs = [
            FailOver("a", 0, 3, 100, None),
            FailOver("a", 0, 4, 200, None),
            FailOver("a", 1, 9, 50, 12),
            FailOver("b", 0, 1, 10, None),
        ]
        assert [(one.topic, one.partition, one.leader_epoch) for one in changes_of_leaders(epochs)] == [
            ("a", 1, 9),
            ("a", 0, 4),
        ]

    def test_an_uneven_topic_is_marked(self) -> None:
        report = reports.made({"orders": 2})
        topics = [msgspec.structs.replace(report.topics[0], skew=1.8)]
        partitions = [
            msgspec.structs.replace(one, share=share) for one, share in zip(report.partitions, (0.9, 0.1), strict=True)
        ]
        found = read(msgspec.structs.replace(report, topics=topics, partitions=partitions)).words
        assert "orders/0 holds 90 % of its topic, 1.8 times the mean" in found


class TestWhatItBears:
    def test_the_page_is_one_file_and_makes_no_request(self) -> None:
        html = page.html(reports.demo())
        found = Reading(html)
        assert found.all("img") == []
        assert all("src" not in script for script in found.all("script"))
        assert [link["href"] for link in found.all("link") if not str(link["href"]).startswith("data:")] == []
        assert "@import" not in html
        assert re.findall(r"url\(", html) == []
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html) == []

    def test_names_from_users_are_text_and_never_markup(self) -> None:
        report = reports.made({EVIL: 2, "b": 1}, groups={EVIL: "queue"})
        html = page.html(msgspec.structs.replace(report, sources=[EVIL]))
        found = Reading(html)
        assert found.all("img") == []
        assert EVIL in found.words
        assert len([script for script in found.all("script") if script.get("type") != "application/json"]) == 1
        for data in re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL):
            json.loads(data)

    def test_text_becomes_markup_only_if_declared_as_markup(self) -> None:
        assert element("p", "a < b", Markup("<b>c</b>"), ["&"], None, title='"x"', hidden=False, inert=True) == (
            '<p title="&quot;x&quot;" inert>a &lt; b<b>c</b>&amp;</p>'
        )

    def test_figures_without_a_number_do_not_break_the_page(self) -> None:
        report = reports.demo()
        wild = Quantiles(float("nan"), float("nan"), float("inf"), float("inf"), float("inf"))
        groups = [msgspec.structs.replace(one, latency_ms=wild) for one in report.groups]
        over_time = [msgspec.structs.replace(one, p99_ms=float("nan")) for one in report.latency_over_time]
        made = msgspec.structs.replace(report, groups=groups, latency_over_time=over_time, made_at_ms=10**18)
        found = read(made).words
        assert "nan" not in found
        assert "10" in found

    def test_distant_times_make_no_endless_axis(self) -> None:
        times = Times.over([0, 10**12], 1_000)
        assert times
        assert times.columns <= 480
        assert times.column(10**12) == times.columns - 1
        assert len(times.ticks) <= 9

    def test_the_biggest_report_stays_about_a_megabyte(self) -> None:
        assert len(page.html(reports.biggest()).encode()) < 1_300_000
        assert len(page.html(reports.demo()).encode()) < 200_000

    def test_a_page_is_replaced_as_a_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "report.html"
        page.write(reports.demo(), path)
        page.write(reports.nothing(), path)
        assert "No messages yet" in path.read_text(encoding="utf-8")
        assert list(tmp_path.iterdir()) == [path]

    def test_every_plot_has_a_text_alternative(self) -> None:
        found = read(reports.demo())
        plots = [div for div in found.all("div") if div.get("aria-roledescription") == "plot"]
        assert len(plots) >= 6
        assert all(len(str(plot["aria-label"])) > 20 and plot["tabindex"] == "0" for plot in plots)
        assert len(found.all("details")) >= len(plots)
        assert len(found.all("caption")) == len(found.all("table"))


class TestAxes:
    @pytest.mark.parametrize(("most", "top"), [(0, 1), (1, 1), (4_541, 6_000), (99, 100), (0.3, 0.3)])
    def test_a_linear_axis_ends_at_a_round_number(self, most: float, top: float) -> None:
        axis = Linear.up_to(most)
        assert axis.top == pytest.approx(top)
        assert axis.percent(most) <= 100
        assert 3 <= len(axis.ticks) <= 6

    def test_a_logarithmic_axis_runs_in_decades(self) -> None:
        axis = Logarithmic.around([4.1, 1_590], label=str)
        assert (axis.bottom, axis.top) == (1, 10_000)
        assert axis.percent(100) == pytest.approx(50)
        assert axis.percent(0) == 0

    def test_latency_borders_below_a_millisecond(self) -> None:
        report = msgspec.structs.replace(reports.demo(), latencies=[LatencyBucket("controllers", 0, 1, 5)])
        assert "controllers got 99 % within 1 ms" in read(report).words


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    program = chromium.find()
    if program is None:
        told = "there is no Chromium here (on Debian: apt-get install chromium)"
        assert os.environ.get("PORTALMQ_CHROMIUM_REQUIRED") != "1", told
        pytest.skip(told)
    with chromium.Chromium(program, tmp_path_factory.mktemp("chromium")) as made:
        yield made


class TestWhatIsSeen:
    @pytest.mark.parametrize("dark", [False, True])
    @pytest.mark.parametrize("width", [390, 1440])
    @pytest.mark.parametrize("name", ["demo", "nothing", "biggest"])
    def test_the_page_fits_the_screen_and_loads_alone_without_errors(
        self, browser: chromium.Chromium, tmp_path: Path, name: str, width: int, dark: bool
    ) -> None:
        path = tmp_path / "report.html"
        page.write(getattr(reports, name)(), path)
        browser.open(path, width=width, dark=dark)
        assert browser.seen.complaints == []
        assert browser.seen.requests == [path.as_uri()]
        assert browser.ask("document.documentElement.scrollWidth") <= width
        beside = browser.ask(
            "[...document.querySelectorAll('h1, h2, h3, figure, .tiles > div, .chart')]"
            ".map((e) => e.getBoundingClientRect())"
            ".filter((box) => box.right > innerWidth + 1 || box.left < -1).length"
        )
        assert beside == 0
        light = int(browser.ask("getComputedStyle(document.body).backgroundColor").split("(")[1].split(",")[0])
        assert light < 64 if dark else light > 192

    def test_the_columns_of_a_plot_are_drawn(self, browser: chromium.Chromium, tmp_path: Path) -> None:
        path = tmp_path / "report.html"
        page.write(reports.demo(), path)
        browser.open(path)
        boxes: list[dict[str, Any]] = browser.ask(
            "[...document.querySelectorAll('#throughput .chart path')]"
            ".map((e) => ({ width: e.getBoundingClientRect().width, colour: getComputedStyle(e).fill }))"
        )
        assert len(boxes) == 24
        assert all(box["width"] > 300 for box in boxes)
        assert len({box["colour"] for box in boxes}) == 12
        assert len(browser.picture()) > 30_000

    def test_the_cursor_shows_the_values_of_a_column(self, browser: chromium.Chromium, tmp_path: Path) -> None:
        path = tmp_path / "report.html"
        report = reports.demo()
        page.write(report, path)
        browser.open(path)
        browser.ask(
            "document.querySelector('#throughput .canvas').scrollIntoView({block: 'center', behavior: 'instant'})"
        )
        box = browser.ask(
            "(({ x, y, width, height }) => [x, y, width, height])"
            "(document.querySelector('#throughput .canvas').getBoundingClientRect())"
        )
        browser.point(box[0] + 2, box[1] + box[3] / 2)
        first = sum(one.messages for one in report.throughput if one.at_ms == reports.BEGAN_MS)
        told = browser.ask("document.querySelector('.tip').innerText")
        assert told.startswith("00:21:47")
        assert f"{first:,}/s" in told
        browser.ask("document.querySelector('#throughput .canvas').focus()")
        browser.press("ArrowRight")
        assert browser.ask("document.querySelector('.tip').innerText").startswith("00:21:48")
        assert browser.ask("document.querySelector('#throughput .voice').textContent").startswith("00:21:48, all ")
        browser.press("Escape")
        assert browser.ask("document.querySelectorAll('.tip').length") == 0

    def test_a_name_that_is_a_script_does_not_run(self, browser: chromium.Chromium, tmp_path: Path) -> None:
        path = tmp_path / "report.html"
        page.write(reports.made({EVIL: 1}, groups={EVIL: "queue"}), path)
        browser.open(path)
        assert browser.seen.complaints == []
        assert browser.seen.requests == [path.as_uri()]
        assert browser.ask("document.querySelectorAll('img').length") == 0
        browser.ask("document.querySelector('#latency .canvas').focus()")
        browser.press("End")
        assert browser.ask("document.querySelectorAll('.tip, .tip *').length") > 2
        assert browser.ask("document.querySelectorAll('.tip img, .tip script').length") == 0

    def test_the_page_can_be_printed(self, browser: chromium.Chromium, tmp_path: Path) -> None:
        path = tmp_path / "report.html"
        page.write(reports.demo(), path)
        browser.open(path)
        paper = browser.paper()
        assert paper.startswith(b"%PDF")
        assert 2 <= len(re.findall(rb"/Type\s*/Page\b(?!s)", paper)) <= 12


class TestBursts:
    def drawn(self, values: list[float | None]) -> str:
        times = Times(0, 1_000, len(values))
        series = [plots.PlotSeries("t", values)]
        return str(plots.stacked(series, times, unit="/s", label=words.brief, describe="Columns"))

    def test_one_burst_does_not_flatten_the_plot_and_its_height_is_shown(self) -> None:
        drawn = self.drawn([10.0] * 40 + [5_000.0])
        assert "cut here: 5,000/s" in drawn
        assert ">15<" in drawn, "the ordinate fits the other values"

    def test_an_uneven_series_is_not_cut(self) -> None:
        assert "cut here" not in self.drawn([float(number) for number in range(40)])
        assert "cut here" not in self.drawn([1.0, 2.0, 5_000.0]), "too few to call one of them a burst"
