from __future__ import annotations

from pathlib import Path

from portalmq.demo_iot.ledger import Entry, EntryCount, Ledger, compare, longest_gap_ms, read


def entry(n: int, *, at: float = 0.0, offset: int | None = None, topic: str = "temp_1") -> Entry:
    return Entry(at, topic, f"0-{n if offset is None else offset}", {"sensor": topic, "n": n, "value": 20.5})


class TestLedgers:
    def test_what_is_written_can_be_read_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "ledger"
        with Ledger(path) as ledger:
            ledger.write(entry(1))
            assert list(read([path])) == [entry(1)]
            ledger.write(entry(2))
        with Ledger(path) as ledger:
            ledger.write(entry(3))
        assert list(read([path])) == [entry(1), entry(2), entry(3)]

    def test_a_line_that_was_not_finished_is_no_entry(self, tmp_path: Path) -> None:
        path = tmp_path / "ledger"
        with Ledger(path) as ledger:
            ledger.write(entry(1))
            ledger.write(entry(2))
        path.write_bytes(path.read_bytes()[:-1])
        assert list(read([path])) == [entry(1)]

    def test_without_a_file_nothing_is_written(self) -> None:
        with Ledger(None) as ledger:
            ledger.write(entry(1))

    def test_entries_are_counted_while_ledgers_grow(self, tmp_path: Path) -> None:
        paths = [tmp_path / "one", tmp_path / "two"]
        tally = EntryCount(paths)
        assert tally.count() == 0
        for number in range(1, 4):
            with Ledger(paths[number % 2]) as ledger:
                ledger.write(entry(number))
            assert tally.count() == number


class TestComparing:
    def test_the_same_messages_in_any_order_are_clean(self) -> None:
        found = compare([entry(n) for n in range(5)], [entry(n) for n in reversed(range(5))])
        assert found.is_clean
        assert (found.sent, found.delivered, found.duplicates) == (5, 5, 0)
        assert found.faults() == []

    def test_a_message_that_was_never_delivered_is_lost(self) -> None:
        found = compare([entry(n) for n in range(5)], [entry(n) for n in range(5) if n != 3])
        assert not found.is_clean
        assert found.lost == [entry(3).content]
        assert "acknowledged and never delivered" in found.faults()[0]

    def test_a_message_with_another_content_is_lost_though_the_counts_are_equal(self) -> None:
        changed = Entry(0.0, "temp_1", "0-3", {**entry(3).message, "value": 99})
        found = compare([entry(n) for n in range(5)], [*(entry(n) for n in range(5) if n != 3), changed])
        assert (found.sent, found.delivered) == (5, 5)
        assert not found.is_clean
        assert (found.lost, found.unexpected) == ([entry(3).content], [changed.content])

    def test_a_second_delivery_is_a_duplicate_and_no_fault(self) -> None:
        found = compare([entry(1), entry(2)], [entry(1), entry(2), entry(2), entry(2)])
        assert found.is_clean
        assert found.duplicates == 2

    def test_a_message_that_was_stored_twice_is_a_fault(self) -> None:
        found = compare([entry(1)], [entry(1, offset=7), entry(1, offset=8)])
        assert not found.is_clean
        assert found.stored_twice == [entry(1).content]

    def test_an_unacknowledged_message_that_was_delivered_is_a_fault(self) -> None:
        found = compare([entry(1)], [entry(1), entry(2)])
        assert not found.is_clean
        assert found.unexpected == [entry(2).content]

    def test_nothing_sent_is_a_fault(self) -> None:
        assert not compare([], []).is_clean
        assert compare([], []).faults() == ["nothing was sent"]

    def test_faults_show_a_few_examples_of_many(self) -> None:
        lines = compare([entry(n) for n in range(100)], []).faults()
        assert lines[0].startswith("100 messages")
        assert len(lines) < 10


class TestGaps:
    def test_the_gap_is_measured_around_the_kill(self) -> None:
        assert longest_gap_ms([0.0, 5.0, 10.0, 10.1, 11.6, 11.7, 30.0], around=10.05, within_s=1) == 1500

    def test_a_gap_that_had_begun_before_the_kill_counts_whole(self) -> None:
        assert longest_gap_ms([10.0, 12.0], around=11.0) == 2000

    def test_without_a_later_acknowledgement_the_gap_is_zero(self) -> None:
        assert longest_gap_ms([1.0, 2.0], around=3.0) == 0
        assert longest_gap_ms([], around=3.0) == 0
