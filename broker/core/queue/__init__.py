"""One queue group on a partition: leases, the choice of messages, order by key, lanes, receipts."""
