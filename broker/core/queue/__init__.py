"""One queue group on a partition: leases, selection of messages, order by key, lanes, receipts."""
