// One group: its lag, its unfinished messages, its members; pause, seek with a preview, and its past.
import { useMemo, useState } from "../vendor/preact-htm.js";
import { Chart } from "../charts.js";
import { Act, Card, Choice, Destroy, Dialog, Does, Empty, Fault, Link, Loading, Moment, Page, Same, Stat, Table, Tag, at, call, duration, go, html, moment, number, post, setQuery, shell, short, url, useAct, useGet, usePlace, withQuery } from "../lib.js";
import { Messages } from "./topic.js";

const LAG = [{ label: "not done", colour: "--series-4", fill: true }];
const STATES = { ready: "", in_flight: "info", scheduled: "warn" };

export function Group({ names: [group] }) {
  const { query } = usePlace();
  const moment_ = query.at;
  const path = `/v1/groups/${url(group)}`;
  const found = useGet(withQuery(path, { at: moment_ }), moment_ ? 0 : 2_000);
  const { data } = found;
  const isQueue = data?.mode === "queue";
  const paused = data?.paused;
  return html`<${Page} title=${group} crumbs=${[["Groups", "/ui/groups"]]} at=${found.at} actions=${isQueue && !moment_ && html`<${Pause} group=${group} paused=${paused} reload=${found.reload} />`}>
    ${!data ? html`<${Loading} of=${found} />` : html`
      <${Fault} fault=${found.fault} />
      ${paused && html`<p class="alert warn" role="status">Paused since ${moment(paused.since_ms)}${paused.reason ? `: ${paused.reason}` : ""}. Receives wait; what is in flight can be acked.</p>`}
      ${moment_ && html`<p class="alert warn" role="status">As it was at ${moment(Date.parse(moment_))}. <button onClick=${() => setQuery({ at: "" })}>Now</button></p>`}
      <dl class="stats">
        <${Stat} label="Not done" value=${short(data.lag)} note=${data.lag ? `oldest ${duration(data.oldest_unacked_ms)}` : "nothing waits"} />
        ${isQueue ? html`<${Stat} label="Ready" value=${short(data.ready)} /><${Stat} label="In flight" value=${short(data.in_flight)} note="leased" /><${Stat} label="Scheduled" value=${short(data.scheduled)} note="or in back-off" /><${Stat} label="Dead" value=${short(data.dead)} tone=${data.dead ? "warn" : ""} note=${data.dead ? html`<${Link} to=${`/ui/dead-letters/${url(group)}`}>look at them<//>` : "none"} />` : html`<${Stat} label="Members" value=${data.members ? number(data.members.length) : "–"} note="share the partitions" />`}
      </dl>
      ${isQueue ? html`<${Queue} group=${group} moment_=${moment_} past=${moment_ && data} />` : html`<${Stream} group=${group} past=${moment_ && data} />`}
      ${data.members?.length > 0 && html`<${Card} title="Members"><ul class="plain mono">${data.members.map((each) => html`<li>${each}</li>`)}</ul><//>`}
      ${data.config && html`<div class="columns">
        <${Card} title="Settings"><dl class="facts mono">${Object.entries(data.config).map(([name, value]) => html`<dt>${name}</dt><dd>${value === null || value === "" ? "none" : typeof value === "string" ? value : JSON.stringify(value)}</dd>`)}</dl><//>
        <${Card} title="What cannot be undone"><p>Deleting a group drops its position, its leases and its dead letters. Messages stay in their topics.</p><${Destroy} label="Delete group" name=${group} says=${`The group ${group} is deleted.`} act=${async () => {
          await call("DELETE", path);
          go("/ui/groups");
        }} done=${`${group} is deleted`} /><//>
      </div>`}`}
    <${Same} curl=${at(withQuery(path, { at: moment_ }))} command=${`group show ${shell(group)}${moment_ ? ` --at ${shell(moment_)}` : ""}`} />
  <//>`;
}

function Pause({ group, paused, reload }) {
  const [open, setOpen] = useState(false);
  const [reason, setReason] = useState("");
  const [run, busy] = useAct();
  const change = async (verb, body) => {
    await run(() => call("POST", `/v1/groups/${url(group)}/${verb}`, body), verb === "pause" ? "paused" : "resumed");
    setOpen(false);
    reload();
  };
  if (paused) return html`<${Act} class="primary" disabled=${busy} onClick=${() => change("resume")}>Resume<//>`;
  const submit = (event) => {
    event.preventDefault();
    change("pause", { reason });
  };
  return html`<${Act} aria-haspopup="dialog" onClick=${() => setOpen(true)}>Pause<//><${Dialog} title=${`Pause ${group}`} open=${open} onClose=${() => setOpen(false)}><form onSubmit=${submit}>
    <p>Its receives wait until it is resumed. Leases run out as always; acks work.</p>
    <label>Reason, for others to see<input value=${reason} onInput=${(event) => setReason(event.target.value)} autofocus /></label>
    <${Does} curl=${post(`/v1/groups/${url(group)}/pause`, { reason })} command=${`group pause ${shell(group)}${reason ? ` --reason ${shell(reason)}` : ""}`} />
    <div class="row end"><button type="button" onClick=${() => setOpen(false)}>Cancel</button><button class="primary" disabled=${busy}>Pause</button></div>
  </form><//>`;
}

// What is ready goes to another topic, for another group to work on.
function Move({ group, topic }) {
  const [open, setOpen] = useState(false);
  const [to, setTo] = useState("");
  const [limit, setLimit] = useState(1_000);
  const [dry, setDry] = useState(null);
  const [run, busy] = useAct();
  const wanted = { topic, to_topic: to, limit: Number(limit) };
  const ask = (more) => run(() => call("POST", `/v1/groups/${url(group)}/move`, { ...wanted, ...more }), more ? undefined : (found) => `${number(found.moved)} of ${number(found.matched)} moved to ${to}${found.refused ? `; ${number(found.refused)} stay: ${found.refusal}` : ""}`);
  const close = () => {
    setOpen(false);
    setDry(null);
  };
  const submit = async (event) => {
    event.preventDefault();
    if (await ask()) close();
  };
  return html`<${Act} aria-haspopup="dialog" onClick=${() => setOpen(true)}>Move what is ready<//><${Dialog} title=${`Move what is ready in ${topic}`} open=${open} onClose=${close}><form onSubmit=${submit}>
    <label>To topic<input value=${to} onInput=${(event) => setTo(event.target.value)} required class="mono" autofocus spellcheck="false" /></label>
    <label>At most<input type="number" min="1" max="10000" value=${limit} onInput=${(event) => setLimit(event.target.value)} /></label>
    <p class="hint">They are done for ${group}, and appended to the other topic.</p>
    <${Does} curl=${post(`/v1/groups/${url(group)}/move`, wanted)} command=${`move ${shell(topic)} ${to ? shell(to) : "TO_TOPIC"} --group ${shell(group)} --limit ${limit}`} />
    <div class="row end">${dry && html`<${Tag} tone="info">${number(dry.matched)} are ready<//>`}<button type="button" onClick=${close}>Cancel</button><button type="button" disabled=${busy || !to} onClick=${async () => setDry((await ask({ dry_run: true })) || null)}>Dry run</button><button class="primary" disabled=${busy}>Move</button></div>
  </form><//>`;
}

// The counts of a moment, by topic.
function byTopic(partitions) {
  const found = new Map();
  partitions.forEach((each) => {
    const sums = found.get(each.topic) || { topic: each.topic, ready: 0, in_flight: 0, scheduled: 0, dead: 0, lag: 0 };
    ["ready", "in_flight", "scheduled", "dead", "lag"].forEach((name) => (sums[name] += each[name]));
    found.set(each.topic, sums);
  });
  return [...found.values()];
}

// --- queue groups -------------------------------------------------------------------------------------------------------

function Queue({ group, moment_, past }) {
  const { query } = usePlace();
  const numbers = useGet(`/ui/data/groups/${url(group)}`, 5_000);
  const rows = past ? byTopic(past.partitions) : numbers.data?.topics || [];
  const marks = useMemo(() => (moment_ ? [[Date.parse(moment_), "at", "shown", null]] : []), [moment_]);
  const topic = query.topic || rows.find((each) => each.lag)?.topic || rows[0]?.topic;
  const [more, setMore] = useState({ of: "", messages: [], next: undefined });
  const path = topic && withQuery(`/v1/groups/${url(group)}/messages`, { topic, at: moment_, limit: 50 });
  const found = useGet(path, moment_ ? 0 : 3_000);
  const own = more.of === path ? more : { messages: [], next: undefined };
  const messages = [...(found.data?.messages || []), ...own.messages];
  const next = own.next === undefined ? found.data?.next : own.next;
  const [run, busy] = useAct();
  const goOn = () => run(async () => {
    const page = await call("GET", withQuery(path.split("?")[0], { topic, at: moment_, limit: 50, after: next }));
    setMore({ of: path, messages: [...own.messages, ...page.messages], next: page.next ?? null });
  });
  const lags = useMemo(() => (numbers.data ? [numbers.data.lags.map(([second]) => second), numbers.data.lags.map(([, lag]) => lag)] : null), [numbers.data]);
  return html`<div class="columns">
      <${Card} title="Not done" note="half an hour">${lags && lags[0].length > 1 ? html`<${Chart} label="Messages not done" series=${LAG} data=${lags} marks=${marks} format=${short} height=${150} />` : html`<${Empty}>The first readings come in a few seconds.<//>`}<//>
      <${Card} title="Topics" flush><${Table} label="Topics of the group" rows=${rows} keyOf=${(row) => row.topic} empty="It has received from no topic yet." columns=${[
        { name: "Topic", of: (row) => html`<${Link} to=${`/ui/topics/${url(row.topic)}`}>${row.topic}<//>` },
        { name: "Ready", number: true, of: (row) => number(row.ready) },
        { name: "In flight", number: true, of: (row) => number(row.in_flight) },
        { name: "Scheduled", number: true, of: (row) => number(row.scheduled) },
        { name: "Dead", number: true, of: (row) => (row.dead ? html`<${Link} to=${withQuery(`/ui/dead-letters/${url(group)}`, { topic: row.topic })}>${number(row.dead)}<//>` : "0") },
      ]} /><//>
    </div>
    ${topic && html`<div class="tools"><h2>Unfinished messages</h2>
      <${Choice} label="Topic" value=${topic} options=${rows.map((row) => row.topic)} onChange=${(chosen) => setQuery({ topic: chosen })} /><${Moment} label="As it was at" />${!moment_ && html`<${Move} group=${group} topic=${topic} />`}</div>
    <${Fault} fault=${found.fault} />
    ${found.data && html`<${Card} flush><${Messages} rows=${messages} empty="All is done." extra=${[
      { name: "State", of: (row) => html`<${Tag} tone=${STATES[row.state]}>${row.state.replaceAll("_", " ")}<//>` },
      { name: "Delivered", number: true, of: (row) => number(row.delivery_count) },
      { name: "Available", of: (row) => (row.available_at_ms ? html`<time class="mono">${moment(row.available_at_ms)}</time>` : "now") },
    ]} /><//>${next && html`<p class="pager"><button disabled=${busy} onClick=${goOn}>More</button></p>`}`}`}`;
}

// --- stream groups ------------------------------------------------------------------------------------------------------

function Stream({ group, past }) {
  if (past) return html`<div class="tools"><${Moment} label="As it was at" /></div><${Card} title="Positions" flush><${Table} label="Positions" rows=${past.partitions} keyOf=${(row) => `${row.topic} ${row.partition}`} empty="It had read no topic yet." columns=${[
    { name: "Topic", of: (row) => html`<${Link} to=${`/ui/topics/${url(row.topic)}`}>${row.topic}<//>` },
    { name: "Partition", number: true, of: (row) => row.partition },
    { name: "Behind", number: true, of: (row) => number(row.lag) },
    { name: "Since", number: true, of: (row) => (row.lag ? duration(row.oldest_unacked_ms) : "") },
  ]} /><//>`;
  return html`<div class="tools"><${Moment} label="As it was at" /></div><${Positions} group=${group} />`;
}

function Positions({ group }) {
  const found = useGet(`/v1/groups/${url(group)}/offsets`, 2_000);
  const rows = found.data?.offsets || [];
  const topics = [...new Set(rows.map((row) => row.topic))];
  return html`<${Fault} fault=${found.fault} /><${Card} title="Positions" flush><${Table} label="Positions" rows=${rows} keyOf=${(row) => `${row.topic} ${row.partition}`} empty="It has read no topic yet." columns=${[
      { name: "Topic", of: (row) => html`<${Link} to=${`/ui/topics/${url(row.topic)}`}>${row.topic}<//>` },
      { name: "Partition", number: true, of: (row) => row.partition },
      { name: "Committed", number: true, of: (row) => html`<${Link} to=${withQuery(`/ui/topics/${url(row.topic)}`, { partition: row.partition, offset: row.committed })}>${number(row.committed)}<//>` },
      { name: "End", number: true, of: (row) => number(row.high_watermark) },
      { name: "Behind", number: true, of: (row) => number(row.lag) },
      { name: "Since", number: true, of: (row) => (row.lag ? duration(row.lag_ms) : "") },
    ]} /><//>
    ${topics.length > 0 && html`<${Seek} group=${group} topics=${topics} rows=${rows} reload=${found.reload} />`}`;
}

function Seek({ group, topics, rows, reload }) {
  const [form, setForm] = useState({ topic: topics[0], to: "earliest", partition: "", offset: "", at: "" });
  const [preview, setPreview] = useState(null);
  const [run, busy] = useAct();
  const set = (name) => (value) => {
    setForm({ ...form, [name]: value });
    setPreview(null);
  };
  const wanted = () => {
    const to = form.to === "offset" ? { offset: Number(form.offset) } : form.to === "at" ? { at: new Date(form.at).toISOString() } : form.to;
    return { topic: form.topic, to, ...(form.partition === "" ? {} : { partition: Number(form.partition) }) };
  };
  const path = `/v1/groups/${url(group)}/seek`;
  const look = async (event) => {
    event.preventDefault();
    const found = await run(() => call("POST", path, { ...wanted(), dry_run: true }));
    if (found) setPreview(found);
  };
  const seek = async () => {
    if (await run(() => call("POST", path, wanted()), "moved")) setPreview(null);
    reload();
  };
  const place = (text) => (form.to === "offset" && form.offset === "") || (form.to === "at" && !form.at) ? "…" : text();
  const shown = place(() => {
    try {
      return JSON.stringify(wanted());
    } catch {
      return "…";
    }
  });
  return html`<${Card} title="Seek" note="moves the committed offsets; members go on from there"><form onSubmit=${look} class="tools" data-seek>
      <${Choice} label="Topic" value=${form.topic} options=${topics} onChange=${set("topic")} />
      <${Choice} label="Partition" value=${form.partition} options=${[["", "all"], ...rows.filter((row) => row.topic === form.topic).map((row) => [row.partition, row.partition])]} onChange=${set("partition")} />
      <${Choice} label="To" value=${form.to} options=${["earliest", "latest", ["offset", "an offset"], ["at", "a time"]]} onChange=${set("to")} data-to />
      ${form.to === "offset" && html`<label class="inline">Offset<input type="number" min="0" required value=${form.offset} onInput=${(event) => set("offset")(event.target.value)} data-offset /></label>`}
      ${form.to === "at" && html`<label class="inline">Time<input type="datetime-local" step="1" required value=${form.at} onInput=${(event) => set("at")(event.target.value)} /></label>`}
      <button disabled=${busy}>Preview</button>
    </form>
    ${preview && html`<div data-preview><${Table} label="What the seek would do" rows=${preview.offsets} keyOf=${(row) => row.partition} columns=${[
      { name: "Partition", of: (row) => row.partition },
      { name: "Now", number: true, of: (row) => number(row.from) },
      { name: "Then", number: true, of: (row) => number(row.to) },
      { name: "Moves by", number: true, of: (row) => `${row.to > row.from ? "+" : ""}${number(row.to - row.from)}` },
    ]} /><div class="row end"><button type="button" onClick=${() => setPreview(null)}>Leave it</button><${Act} class="primary" disabled=${busy} onClick=${seek}>Seek<//></div></div>`}
    ${shown !== "…" && html`<${Does} curl=${post(path, JSON.parse(shown))} command=${`group seek ${shell(group)} ${shell(form.topic)} --to ${form.to === "offset" ? form.offset : form.to === "at" ? wanted().to.at : form.to}${form.partition === "" ? "" : ` --partition ${form.partition}`}`} />`}<//>`;
}
