// Dead letters of a group: by reason, one by one, redrive with a dry run and a rate, drop.
import { useMemo, useState } from "../vendor/preact-htm.js";
import { Act, After, Card, Choice, Destroy, Does, Empty, Fault, Link, Loading, Page, Pager, Same, Table, Tag, at, call, html, messageUrl, moment, number, post, setQuery, shell, url, useAct, useGet, usePlace, valueText, withQuery } from "../lib.js";
import { Resend } from "./message.js";
import { whereOf } from "./topic.js";

// Longer reasons are cut, as broker/dashboard/data.py says.
const REASON_LENGTH = 200;

// Reasons that differ in numbers are one: "…" stands for a number. Its longest part finds them all.
const essenceOf = (reason) => reason.split("…").reduce((longest, part) => (part.length > longest.length ? part : longest), "");

const conditionOf = (reason) => (reason.includes("…") || reason.length >= REASON_LENGTH ? { contains: essenceOf(reason) } : { eq: reason });
const isOf = (reason, text) => {
  const { eq, contains } = conditionOf(reason);
  return eq === undefined ? text.includes(contains) : text === eq;
};

export function DeadLetters({ names: [group] }) {
  return group ? html`<${OfGroup} group=${group} />` : html`<${All} />`;
}

function All() {
  const { query } = usePlace();
  const found = useGet(withQuery("/ui/data/groups", { sort: "dead", page: query.page }), 5_000);
  const rows = found.data?.groups || [];
  return html`<${Page} title="Dead letters" at=${found.at}>
    ${!found.data ? html`<${Loading} of=${found} />` : html`<${Card} flush><${Table} label="Groups with dead letters" rows=${rows} keyOf=${(row) => row.group} empty="No group has given up a message." columns=${[
      { name: "Group", of: (row) => html`<${Link} to=${`/ui/dead-letters/${url(row.group)}`}>${row.group}<//>` },
      { name: "Dead", number: true, of: (row) => number(row.dead) },
      { name: "Deliveries at most", number: true, of: (row) => number(row.config.max_deliveries) },
      { name: "Copies go to", of: (row) => html`<span class="mono">${row.config.dead_letter_topic || "nowhere"}</span>` },
    ]} /><//><${Pager} found=${found.data} />`}
    <${Same} curl=${at("/v1/groups")} command="group list" />
  <//>`;
}

function OfGroup({ group }) {
  const { query } = usePlace();
  const numbers = useGet(`/ui/data/groups/${url(group)}`, 3_000);
  const topics = (numbers.data?.topics || []).filter((each) => each.dead);
  const topic = query.topic || topics[0]?.topic;
  const crumbs = [["Dead letters", "/ui/dead-letters"]];
  return html`<${Page} title=${group} crumbs=${crumbs} at=${numbers.at}>
    ${!numbers.data ? html`<${Loading} of=${numbers} />` : !topic ? html`<${Empty}>This group has given up no message.<//>` : html`
      <div class="tools"><${Choice} label="Topic" value=${topic} options=${[...new Set([topic, ...topics.map((each) => each.topic)])]} onChange=${(chosen) => setQuery({ topic: chosen, reason: "", after: "", where: "" })} />
      <${Link} to=${`/ui/groups/${url(group)}`}>the group ${group}<//></div>
      <${Letters} key=${topic} group=${group} topic=${topic} reason=${query.reason} after=${query.after} />`}
  <//>`;
}

function Letters({ group, topic, reason, after }) {
  const reasons = useGet(withQuery(`/ui/data/groups/${url(group)}/dead-letters`, { topic }), 5_000);
  const path = withQuery(`/v1/groups/${url(group)}/dead-letters`, { topic, limit: 50, after });
  const found = useGet(path, 5_000);
  const [chosen, setChosen] = useState(new Set());
  const [edited, setEdited] = useState(null);
  const shown = (found.data?.messages || []).filter((each) => !reason || isOf(reason, each.headers["portalmq-dead-reason"] || ""));
  const changed = () => {
    setChosen(new Set());
    found.reload();
    reasons.reload();
  };
  const choose = (id) => {
    const next = new Set(chosen);
    if (!next.delete(id)) next.add(id);
    setChosen(next);
  };
  const total = reasons.data?.counted || 0;
  return html`
    <${Card} title="By reason" note=${reasons.data?.more ? `of the first ${number(total)}` : reasons.data ? `${number(total)} in all` : ""}>${reasons.data ? (reasons.data.reasons.length ? html`<ul class="reasons">${reasons.data.reasons.slice(0, 12).map((each) => html`<li key=${each.reason}><button aria-pressed=${reason === each.reason} onClick=${() => setQuery({ reason: reason === each.reason ? "" : each.reason })}><meter min="0" max=${total} value=${each.count}></meter><b>${number(each.count)}</b><span>${each.reason || "deliveries used up, without a reason"}</span></button></li>`)}</ul>` : html`<${Empty}>None are left.<//>`) : html`<${Loading} of=${reasons} />`}<//>
    <${Redrive} group=${group} topic=${topic} reason=${reason} chosen=${chosen} done=${changed} />
    <${Fault} fault=${found.fault} />
    ${found.data && html`<${Card} flush><${Table} label="Dead letters" rows=${shown} keyOf=${(row) => row.id} empty=${reason ? "None on this page has that reason." : "None."} columns=${[
      { name: html`<span class="hidden">Choose</span>`, of: (row) => html`<input type="checkbox" aria-label=${`choose ${row.id}`} checked=${chosen.has(row.id)} onChange=${() => choose(row.id)} />` },
      { name: "Message", of: (row) => html`<${Link} to=${messageUrl(row)} class="mono">${row.id}<//>` },
      { name: "Given up", minor: true, of: (row) => html`<time class="mono">${moment(Number(row.headers["portalmq-dead-at-ms"]) || row.timestamp_ms)}</time>` },
      { name: "Deliveries", number: true, minor: true, of: (row) => row.headers["portalmq-delivery-count"] },
      { name: "Reason", of: (row) => html`<span class="cut">${row.headers["portalmq-dead-reason"] || html`<span class="muted">none</span>`}</span>` },
      { name: "Key", minor: true, of: (row) => html`<span class="mono cut">${row.key ?? ""}</span>` },
      { name: "Value", wide: true, of: (row) => html`<span class="mono cut">${String(valueText(row)).slice(0, 300)}</span>` },
      { name: html`<span class="hidden">Edit</span>`, of: (row) => html`<${Act} class="quiet" onClick=${() => setEdited(row)}>edit<//>` },
    ]} /><//>
    <${After} next=${found.data.next_after} />`}
    ${edited && html`<${Resend} key=${edited.id} message=${edited} label=${`Edit ${edited.id} and send the copy`} opened onClose=${() => setEdited(null)} />`}
    <${Same} curl=${at(`/v1/groups/${url(group)}/dead-letters?topic=${url(topic)}`)} command=${`dlq list ${shell(group)} ${shell(topic)}`} />`;
}

function Redrive({ group, topic, reason, chosen, done }) {
  const { query } = usePlace();
  const [filter, setFilter] = useState(query.where || "");
  const [perSecond, setPerSecond] = useState("");
  const [dry, setDry] = useState(null);
  const [run, busy] = useAct();
  const ids = [...chosen];
  const [wanted, wrong] = useMemo(() => {
    try {
      const where = { ...(reason ? { reason: conditionOf(reason) } : {}), ...whereOf(filter) };
      const which = ids.length ? { ids } : Object.keys(where).length ? { where } : {};
      return [{ topic, ...which, ...(Number(perSecond) > 0 ? { rate_per_s: Number(perSecond) } : {}) }, null];
    } catch (fault) {
      return [null, fault.message];
    }
  }, [filter, reason, perSecond, chosen]);
  const path = `/v1/groups/${url(group)}/dead-letters/redrive`;
  const key = JSON.stringify(wanted);
  const look = async () => {
    const found = await run(() => call("POST", path, { ...wanted, dry_run: true }));
    if (found) setDry({ key, matched: found.matched });
  };
  const redrive = async () => {
    if (await run(() => call("POST", path, wanted), (found) => `${number(found.redriven)} of ${number(found.matched)} are delivered again`)) {
      setDry(null);
      done();
    }
  };
  const which = ids.length ? `the ${ids.length} chosen` : wanted?.where ? "those that match" : "all";
  const matched = dry && dry.key === key ? dry.matched : null;
  return html`<${Card} title="Redrive or drop" note=${which}>
    <div class="tools">
      <input type="search" class="grow mono" aria-label="Only those that match" placeholder="Only those that match: value.order>100  reason~timeout" value=${filter} onInput=${(event) => setFilter(event.target.value)} onChange=${(event) => setQuery({ where: event.target.value })} disabled=${ids.length > 0} spellcheck="false" data-search />
      <label class="inline">At most<input type="number" min="0" step="any" value=${perSecond} onInput=${(event) => setPerSecond(event.target.value)} placeholder="no limit" />a second</label>
    </div>
    ${wrong && html`<p class="alert" role="alert">${wrong}</p>`}
    <div class="row" data-redrive>
      <${Act} disabled=${busy || !wanted} onClick=${look}>Dry run<//>
      ${matched !== null && html`<${Tag} tone="info">${number(matched)} match<//>`}
      <${Act} class="primary" disabled=${busy || !wanted} onClick=${redrive}>Redrive ${which}<//>
      ${!wanted?.where && html`<${Destroy} label=${ids.length ? "Drop the chosen" : "Drop all"} name=${group} says=${`${ids.length ? `${ids.length} dead letters` : `All dead letters of ${group} on ${topic}`} are dropped. Copies in the dead-letter topic stay.`} act=${async () => {
        const found = await call("DELETE", withQuery(`/v1/groups/${url(group)}/dead-letters`, { topic, ids: ids.join(",") }));
        done();
        return found;
      }} done=${(found) => `${number(found.dropped)} dropped`} />`}
    </div>
    ${wanted && html`<${Does} curl=${post(path, wanted)} command=${`dlq redrive ${shell(group)} ${shell(topic)}${ids.length ? ` --ids ${ids.join(",")}` : wanted.where ? ` --where ${shell(JSON.stringify(wanted.where))}` : ""}${wanted.rate_per_s ? ` --rate ${wanted.rate_per_s}` : ""}`} />`}
  <//>`;
}
