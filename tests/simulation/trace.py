"""An event of the core and its actions, on one readable line."""

from __future__ import annotations

from portalmq.broker.core.replica import events as core


def is_worth_tracing(event: core.Event) -> bool:
    """Return whether a step without actions is worth a line."""
    return not isinstance(event, core.Tick | core.LeaseRenewed | core.FetchReplied)


def line_of(event: core.Event, actions: list[core.Action]) -> str:
    return _event(event) + (" -> " + ", ".join(_action(action) for action in actions) if actions else "")


def _event(event: core.Event) -> str:
    match event:
        case core.PartitionStateChanged():
            return _state(event)
        case core.IsrAnswered():
            state = f": {_state(event.partition_state)}" if event.partition_state else ""
            return f"isr change at v{event.version} {event.outcome.value}{state}"
        case core.AppendRequested():
            return f"{event.token} x{event.count}{_stamp(event.stamp)} wanted"
        case core.Appended():
            return f"durable to {event.end_offset}"
        case core.Truncated():
            return f"log ends at {event.end_offset}"
        case core.LogReset():
            return f"log begins at {event.offset}"
        case core.FetchReceived():
            return f"asked: {_fetch(event.fetch)}"
        case core.FetchReplied():
            return f"answered {_reply(event.reply)} to {_fetch(event.fetch)}"
        case core.FollowerRefused():
            return f"{event.broker_id} refuses connections"
        case core.BrokersChanged():
            return "brokers " + " ".join(f"{id}:{inc}@{store}" for id, (inc, store) in event.brokers.items())
        case _:
            return type(event).__name__


def _action(action: core.Action) -> str:
    match action:
        case core.Append():
            what = "START" if action.token is None else str(action.token).partition(" ")[0]
            return f"append {what} at {action.base_offset}e{action.leader_epoch}"
        case core.Refuse():
            return f"refuse {action.token} ({action.error.code})"
        case core.AnswerDuplicate():
            return f"{action.token} repeats {action.base_offset}"
        case core.ReplyFetch():
            return "logs match" if action.reply is None else f"reply {_reply(action.reply)}"
        case core.ProposeIsr():
            kind = "resign to" if action.resigns else "propose"
            return f"{kind} {sorted(action.isr)} at v{action.version}"
        case core.SendFetch():
            return f"ask {action.leader}: {_fetch(action.fetch)}"
        case core.Truncate():
            return f"TRUNCATE to {action.to_offset}"
        case core.ResetLog():
            return f"RESET to {action.offset}"
        case core.HighWatermarkAdvanced():
            return f"hw {action.high_watermark}"
        case core.RememberEpoch():
            return f"remember e{action.leader_epoch}"
        case core.StepDown():
            return "STEP DOWN"
        case core.Refresh():
            return f"refresh {action.number}"
        case _:
            return type(action).__name__


def _state(state: core.PartitionStateChanged) -> str:
    refresh = f" (refresh {state.refresh})" if state.refresh else ""
    stores = " ".join(f"{id}@{store}" for id, store in (state.store_uuids or {}).items())
    return (
        f"state v{state.version} leader {state.leader} e{state.leader_epoch} isr {sorted(state.isr)}"
        f" min {state.min_insync_replicas} of {list(state.replicas)} {stores}{refresh}"
    )


def _fetch(fetch: core.Fetch) -> str:
    return (
        f"fetch {fetch.number} of {fetch.broker_id}:{fetch.incarnation}@{fetch.store_uuid} e{fetch.leader_epoch}"
        f" from {fetch.fetch_offset} last e{fetch.last_epoch}"
    )


def _reply(reply: core.Reply) -> str:
    match reply:
        case core.Records():
            end = f" to {reply.batches[-1].end_offset}" if reply.batches else ""
            return f"records{end} hw {reply.high_watermark}"
        case core.Diverging():
            return f"diverging e{reply.epoch} ends {reply.end}"
        case core.BelowStart():
            return f"below start {reply.offset}"
        case core.Rejected():
            return f"rejected e{reply.leader_epoch}"


def _stamp(stamp: core.Stamp | None) -> str:
    return f" {stamp.producer_id}/{stamp.producer_epoch}/{stamp.sequence}" if stamp else ""
