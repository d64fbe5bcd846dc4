// Recurring messages: all schedules, one with its ticks, and a form to define one.
import { isJson, messageJson } from "../exact.js";
import { useState } from "../vendor/preact-htm.js";
import { Act, Card, Destroy, Empty, Fault, Link, Loading, Page, Pager, Same, Search, Stat, Table, Tag, Value, at, call, duration, go, html, moment, setQuery, shell, url, useAct, useGet, usePlace, valueText, withQuery } from "../lib.js";
import { headersOf } from "./topic.js";

const HOME = "/ui/schedules";
const UNITS = { d: 86_400_000, h: 3_600_000, m: 60_000, s: 1_000, ms: 1 };
const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone;

// An interval as the command takes it: 90s, 15m.
const spanOf = (ms) => {
  const [unit, of] = Object.entries(UNITS).find(([, each]) => ms % each === 0);
  return `${ms / of}${unit}`;
};
const msOf = (text) => {
  const [, figure, unit] = /^(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)$/.exec(text.trim()) || [];
  return unit ? Math.round(Number(figure) * UNITS[unit]) : null;
};
const When = ({ of }) => (of.cron ? html`<span class="mono">${of.cron}</span> <span class="muted">${of.timezone}</span>` : html`every <span class="mono">${spanOf(of.every_ms)}</span>`);
const nextOf = (ms, now) => (ms ? `in ${duration(Math.max(0, ms - now))}` : "–");
const lastOf = (ms, now) => (ms === null ? "unknown" : ms ? `${duration(Math.max(0, now - ms))} ago` : "none yet");

function inZone(ms, timeZone) {
  try {
    return new Intl.DateTimeFormat("sv-SE", { timeZone, dateStyle: "short", timeStyle: "medium" }).format(ms);
  } catch {
    return ""; // a zone that the broker knows and this browser does not
  }
}
const Ticks = ({ ticks, zone }) => html`<ol class="plain mono" data-ticks>${ticks.map((ms) => html`<li key=${ms}><time>${inZone(ms, ZONE)}</time>${zone !== ZONE && html` <span class="muted">${inZone(ms, zone)} ${zone}</span>`}</li>`)}</ol>`;

export function Schedules() {
  const { query } = usePlace();
  return query.new ? html`<${Define} />` : html`<${All} />`;
}

function All() {
  const { query } = usePlace();
  const found = useGet(withQuery("/ui/data/schedules", { search: query.search, show: query.show, page: query.page }), 3_000);
  const { data } = found;
  return html`<${Page} title="Recurring messages" at=${found.at} actions=${html`<${Act} class="primary" onClick=${() => go(`${HOME}?new=1`)}>Create schedule<//>`}>
    <div class="tools"><${Search} label="Search schedules and topics" />
      <div class="switch" role="group" aria-label="Schedules shown">${[["", "all"], ["running", "running"], ["paused", "paused"]].map(([show, says]) => html`<button aria-pressed=${(query.show || "") === show} onClick=${() => setQuery({ show, page: "" })}>${says}</button>`)}</div>
    </div>
    <${Fault} fault=${data && found.fault} />
    ${data ? html`<${Card} flush><${Table} label="Schedules" rows=${data.schedules} keyOf=${(row) => row.name} empty=${query.search || query.show ? "No schedule is like that." : "There is no schedule yet. One publishes a message at recurring times."} columns=${[
      { name: "Schedule", of: (row) => html`<${Link} to=${`${HOME}/${url(row.name)}`}>${row.name}<//>${row.paused && html` <${Tag} tone="warn">paused<//>`}` },
      { name: "When", of: (row) => html`<${When} of=${row} />` },
      { name: "Topic", minor: true, of: (row) => html`<${Link} to=${`/ui/topics/${url(row.topic)}`}>${row.topic}<//>` },
      { name: "Next tick", number: true, of: (row) => html`<span title=${row.next_ms ? moment(row.next_ms) : ""}>${nextOf(row.next_ms, data.at_ms)}</span>` },
      { name: "Last tick", number: true, of: (row) => html`<span title=${row.last_ms ? moment(row.last_ms) : ""}>${lastOf(row.last_ms, data.at_ms)}</span>` },
    ]} /><//><${Pager} found=${data} />` : html`<${Loading} of=${found} />`}
    <${Same} curl=${at("/v1/schedules")} command="schedule list" />
  <//>`;
}

export function Schedule({ names: [name] }) {
  const { query } = usePlace();
  const path = `/v1/schedules/${url(name)}`;
  const found = useGet(path, query.edit ? 0 : 2_000);
  const ticks = useGet(`/ui/data/schedules/${url(name)}`, 2_000);
  const [run, busy] = useAct();
  const { data } = found;
  if (query.edit && data) return html`<${Define} name=${name} from=${data} />`;
  const change = async (verb, done) => {
    await run(() => call("POST", `${path}/${verb}`), done);
    found.reload();
    ticks.reload();
  };
  const { last_ms = null, next_ms = [], at_ms } = ticks.data || {};
  const isLost = data && !data.paused && data.next_tick === null;
  return html`<${Page} title=${name} crumbs=${[["Recurring messages", HOME]]} at=${found.at} actions=${data && html`${data.paused ? html`<${Act} class="primary" disabled=${busy} onClick=${() => change("resume", "resumed")}>Resume<//>` : html`<${Act} disabled=${busy} onClick=${() => change("pause", "paused")}>Pause<//>`}<${Act} onClick=${() => setQuery({ edit: 1 }, {})}>Edit<//>`}>
    ${!data ? html`<${Loading} of=${found} />` : html`
      <${Fault} fault=${found.fault || ticks.fault} />
      ${isLost && html`<p class="alert warn" role="status">It has no next tick: its topic is gone, and it goes on when there is one of that name again; or its cron line has no moment left.</p>`}
      <dl class="stats">
        <${Stat} label="State" value=${data.paused ? "paused" : isLost ? "waits" : "running"} tone=${data.paused || isLost ? "warn" : ""} note=${data.paused ? "ticks pass without a message" : html`<${When} of=${data} />`} />
        <${Stat} label="Next tick" value=${ticks.data ? nextOf(next_ms[0], at_ms) : "–"} note=${next_ms.length ? moment(next_ms[0]) : ""} />
        <${Stat} label="Last tick" value=${ticks.data ? lastOf(last_ms, at_ms) : "–"} note=${last_ms ? moment(last_ms) : last_ms === 0 ? "" : "its leader does not tell"} />
      </dl>
      <div class="columns">
        <${Card} title="Definition"><dl class="facts">
          <dt>when</dt><dd><${When} of=${data} /></dd>
          <dt>topic</dt><dd><${Link} to=${`/ui/topics/${url(data.topic)}`}>${data.topic}<//>, partition ${data.partition}; <${Link} to=${withQuery(`/ui/topics/${url(data.topic)}`, { partition: data.partition, where: JSON.stringify({ "headers.portalmq-schedule": { eq: name } }) })}>its messages<//></dd>
          <dt>key</dt><dd class="mono">${data.key ?? data.key_base64 ?? html`<span class="muted">none</span>`}</dd>
          <dt>headers</dt><dd class="mono">${Object.entries(data.headers).map(([header, value]) => `${header}: ${value}`).join(", ") || html`<span class="muted">none</span>`}</dd>
          <dt>after an outage</dt><dd>${data.catch_up ? "the last missed tick is published" : "missed ticks are left out"}</dd>
        </dl><//>
        <${Card} title="Next ticks">${next_ms.length ? html`<${Ticks} ticks=${next_ms} zone=${data.cron ? data.timezone : ZONE} />` : html`<${Empty}>${data.paused ? "None while it is paused." : "None."}<//>`}<//>
      </div>
      <div class="columns">
        <${Card} title="Value" note=${data.content_type}><${Value} message=${data} /><//>
        <${Card} title="What cannot be undone"><p>Deleting a schedule ends it. Messages that it has published stay in their topic.</p><${Destroy} label="Delete schedule" name=${name} says=${`The schedule ${name} is deleted.`} act=${async () => {
          await call("DELETE", path);
          go(HOME);
        }} done=${`${name} is deleted`} /><//>
      </div>`}
    <${Same} curl=${at(path)} command=${`schedule show ${shell(name)}`} />
  <//>`;
}

const isJsonType = (type) => /^[^;]*[/+]json\s*(;|$)/i.test(type);

// The value of a schedule as it was, or as it was typed.
function valueOf(typed, from) {
  if (typed === null && from) return { value: from.value, value_json: from.value_json, value_base64: from.value_base64, content_type: from.content_type };
  const text = typed || "";
  if (from && !isJsonType(from.content_type)) return { value: text, content_type: from.content_type };
  return isJson(text) ? { value: 0, value_json: text.trim() } : { value: text, content_type: "text/plain; charset=utf-8" };
}

// The form of a new schedule, or of one that is changed.
function Define({ name, from }) {
  const [form, setForm] = useState({
    name: name || "", topic: from?.topic || "", by: from?.every_ms ? "every" : "cron", cron: from?.cron || "", timezone: from?.timezone || "UTC", every: from?.every_ms ? spanOf(from.every_ms) : "",
    value: null, key: from?.key || "", headers: Object.entries(from?.headers || {}).map(([header, value]) => `${header}: ${value}`).join("\n"), paused: from?.paused || false, catch_up: from?.catch_up ?? true,
  });
  const [run, busy] = useAct();
  const typed = (field) => (event) => setForm({ ...form, [field]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const isCron = form.by === "cron";
  const preview = useGet(isCron && form.cron.trim() ? withQuery("/ui/data/ticks", { cron: form.cron, timezone: form.timezone }) : null);
  const every_ms = msOf(form.every);
  const value = valueOf(form.value, from);
  const headers = headersOf(form.headers);
  const key = form.key ? { key: form.key } : from?.key_base64 ? { key_base64: from.key_base64 } : {};
  const body = messageJson({
    topic: form.topic, ...(isCron ? { cron: form.cron, ...(form.timezone === "UTC" ? {} : { timezone: form.timezone }) } : { every_ms }), ...value, ...key,
    ...(Object.keys(headers).length ? { headers } : {}), ...(form.paused ? { paused: true } : {}), ...(form.catch_up ? {} : { catch_up: false }),
  });
  const path = `/v1/schedules/${url(form.name || "NAME")}`;
  const save = async (event) => {
    event.preventDefault();
    const saved = await run(async () => {
      if (!from && (await call("GET", path).catch((fault) => fault.status !== 404))) throw new Error(`There is a schedule ${form.name} already: edit that one.`);
      return call("PUT", path, body);
    }, `${form.name} is saved`);
    if (saved) go(`${HOME}/${url(form.name)}`);
  };
  const words = ["schedule create", shell(form.name || "NAME"), "--topic", shell(form.topic), ...(isCron ? ["--cron", shell(form.cron), ...(form.timezone === "UTC" ? [] : ["--timezone", shell(form.timezone)])] : ["--every", every_ms ? spanOf(every_ms) : "15m"]), "--value", shell(value.value_json ?? value.value ?? ""), ...(value.value_json === undefined ? [] : ["--json"]), ...(form.key ? ["-k", shell(form.key)] : []), ...Object.entries(headers).flatMap(([header, of]) => ["-H", shell(`${header}=${of}`)]), ...(form.paused ? ["--paused"] : []), ...(form.catch_up ? [] : ["--no-catch-up"])];
  const hasCommand = !value.value_base64 && !key.key_base64 && (!value.content_type || value.value_json !== undefined || value.content_type.startsWith("text/plain"));
  return html`<${Page} title=${from ? `Edit ${name}` : "Create schedule"} crumbs=${[["Recurring messages", HOME], ...(from ? [[name, `${HOME}/${url(name)}`]] : [])]}>
    <${Card}><form onSubmit=${save} data-define>
      <div class="row">${!from && html`<label>Name<input name="name" value=${form.name} onInput=${typed("name")} required pattern="[A-Za-z0-9._\\-]{1,190}" autocomplete="off" spellcheck="false" autofocus /></label>`}
        <label>Topic<input name="topic" value=${form.topic} onInput=${typed("topic")} required autocomplete="off" spellcheck="false" /></label></div>
      <div class="row"><label>When<select name="by" onChange=${typed("by")}>${[["cron", "by a cron line"], ["every", "every"]].map(([by, says]) => html`<option value=${by} selected=${by === form.by}>${says}</option>`)}</select></label>
        ${isCron ? html`<label>Cron line<input name="cron" class="mono" value=${form.cron} onInput=${typed("cron")} required placeholder="0 6 * * 1-5" title="minute, hour, day of month, month, day of week" autocomplete="off" spellcheck="false" /></label>
        <label>Time zone<input name="timezone" value=${form.timezone} onInput=${typed("timezone")} required list="zones" autocomplete="off" spellcheck="false" /><datalist id="zones">${(Intl.supportedValuesOf?.("timeZone") || []).map((each) => html`<option value=${each} />`)}</datalist></label>` : html`<label>Interval<input name="every" class="mono" value=${form.every} onInput=${typed("every")} required pattern=${"\\s*\\d+(\\.\\d+)?\\s*(ms|s|m|h|d)\\s*"} title="90s, 15m, 2h, 1d" placeholder="15m" autocomplete="off" /></label>`}</div>
      ${isCron && preview.fault && html`<p class="alert" role="alert">${preview.fault.message}</p>`}
      ${isCron && preview.data && html`<div class="preview" role="status"><p class="hint">It would tick at</p><${Ticks} ticks=${preview.data.next_ms} zone=${form.timezone} /></div>`}
      <label>Value<textarea name="value" rows="6" class="mono" value=${form.value ?? (from ? valueText(from) : "")} onInput=${typed("value")} placeholder='{"report": "sales"}' spellcheck="false" disabled=${!!from?.value_base64}></textarea><span class="hint">${from?.value_base64 ? "bytes, which stay as they are" : value.value_json === undefined ? "text" : "JSON"}</span></label>
      <div class="row"><label>Key<input name="key" class="mono" value=${form.key} onInput=${typed("key")} placeholder=${from?.key_base64 ? "bytes, which stay as they are" : "none"} autocomplete="off" /></label></div>
      <label>Headers, one a line<textarea name="headers" rows="2" class="mono" value=${form.headers} onInput=${typed("headers")} placeholder="trace: 42" spellcheck="false"></textarea></label>
      <div class="row wraps"><label class="inline"><input name="paused" type="checkbox" checked=${form.paused} onChange=${typed("paused")} />Paused: ticks pass without a message</label>
        <label class="inline"><input name="catch_up" type="checkbox" checked=${form.catch_up} onChange=${typed("catch_up")} />After an outage, publish the last missed tick</label></div>
      <div class="row end"><button type="button" onClick=${() => go(from ? `${HOME}/${url(name)}` : HOME)}>Cancel</button><${Act} type="submit" class="primary" disabled=${busy}>${from ? "Save" : "Create"}<//></div>
    </form><//>
    <${Same} curl=${`-X PUT ${at(path)} -H 'Content-Type: application/json' -d ${shell(body)}`} command=${hasCommand && words.join(" ")} />
  <//>`;
}
