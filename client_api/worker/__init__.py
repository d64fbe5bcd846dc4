"""The worker: functions that handle the messages of queue groups, and the processes that run them (docs/WORKER.md)."""
