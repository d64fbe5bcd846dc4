// Messages that are not due yet: run now, move, cancel.
import { useEffect, useState } from "../vendor/preact-htm.js";
import { Act, After, Card, Destroy, Dialog, Does, Fault, Link, Loading, Page, Pager, Same, Table, Tag, at, call, duration, html, localTime, messageUrl, moment, number, post, setQuery, shell, url, useAct, useGet, usePlace, valueText, withQuery } from "../lib.js";
import { whereOf } from "./topic.js";

export function Scheduled() {
  const { query } = usePlace();
  const [typed, setTyped] = useState(query.topic || "");
  const [read, setRead] = useState(null);
  const topics = useGet(withQuery("/ui/data/topics", { search: typed, limit: 20 }));
  const show = (event) => {
    event.preventDefault();
    setQuery({ topic: typed, after: "", where: "" }, {});
  };
  return html`<${Page} title="Scheduled" at=${read}>
    <form class="tools" onSubmit=${show}><label class="inline">Topic<input list="topics" class="mono" value=${typed} onInput=${(event) => setTyped(event.target.value)} data-search autocomplete="off" spellcheck="false" /></label>
      <datalist id="topics">${(topics.data?.topics || []).map((each) => html`<option value=${each.name} />`)}</datalist><button>Show</button></form>
    ${query.topic ? html`<${OfTopic} key=${query.topic} topic=${query.topic} after=${query.after} onRead=${setRead} />` : html`<${Having} onRead=${setRead} />`}
  <//>`;
}

// The topics that have some.
function Having({ onRead }) {
  const { query } = usePlace();
  const found = useGet(withQuery("/ui/data/topics", { sort: "scheduled", limit: 20, page: query.page }), 5_000);
  useEffect(() => onRead(found.at), [found.at]);
  return html`${found.data ? html`<${Card} title="Topics with delayed messages" note="on this broker" flush><${Table} label="Topics with delayed messages" rows=${found.data.topics} keyOf=${(row) => row.name} empty="No topic on this broker has delayed messages." columns=${[
      { name: "Topic", of: (row) => html`<${Link} to=${`/ui/scheduled?topic=${url(row.name)}`}>${row.name}<//>` },
      { name: "Not due yet", number: true, of: (row) => number(row.scheduled) },
    ]} /><//><${Pager} found=${found.data} />` : html`<${Loading} of=${found} />`}
    <${Same} curl=${at("/ui/data/topics?sort=scheduled")} command="scheduled list TOPIC" />`;
}

function OfTopic({ topic, after, onRead }) {
  const [moved, setMoved] = useState(null);
  const [run, busy] = useAct();
  const path = `/v1/topics/${url(topic)}/scheduled`;
  const found = useGet(withQuery(path, { limit: 100, after }), 3_000);
  useEffect(() => onRead(found.at), [found.at]);
  const act = async (does, done) => {
    await run(does, done);
    found.reload();
  };
  const move = async (event) => {
    event.preventDefault();
    const at_ms = new Date(new FormData(event.target).get("at")).getTime();
    await act(() => call("PATCH", `${path}/${moved.id}`, { deliver_at_ms: at_ms }), `${moved.id} is due ${moment(at_ms)}`);
    setMoved(null);
  };
  const rows = found.data?.messages || [];
  return html`<${Fault} fault=${found.fault} />
    <${Many} topic=${topic} done=${found.reload} />
    ${found.data && html`<${Card} title=${topic} note="the next one due first" flush><${Table} label="Scheduled messages" rows=${rows} keyOf=${(row) => row.id} empty="Nothing is scheduled." columns=${[
      { name: "Message", of: (row) => html`<${Link} to=${messageUrl(row)} class="mono">${row.id}<//>` },
      { name: "Due", minor: true, of: (row) => html`<time class="mono">${moment(row.deliver_at_ms)}</time>` },
      { name: "In", number: true, of: (row) => duration(Math.max(0, row.deliver_at_ms - Date.now())) },
      { name: "Key", minor: true, of: (row) => html`<span class="mono cut">${row.key ?? ""}</span>` },
      { name: "Value", wide: true, of: (row) => html`<span class="mono cut">${String(valueText(row)).slice(0, 300)}</span>` },
      { name: html`<span class="hidden">Acts</span>`, of: (row) => html`<span class="row tight"><${Act} class="quiet" disabled=${busy} onClick=${() => act(() => call("POST", `${path}/${row.id}/run`), `${row.id} is due now`)}>run now<//><${Act} class="quiet" aria-haspopup="dialog" onClick=${() => setMoved(row)}>move<//><${Act} class="quiet bad" disabled=${busy} onClick=${() => act(() => call("DELETE", `${path}/${row.id}`), `${row.id} is cancelled`)}>cancel<//></span>` },
    ]} /><//>
    <${After} next=${found.data.next} />`}
    <${Dialog} title=${`Move ${moved?.id}`} open=${!!moved} onClose=${() => setMoved(null)}>${moved && html`<form onSubmit=${move}><label>Due<input name="at" type="datetime-local" step="1" required value=${localTime(moved.deliver_at_ms)} /></label><div class="row end"><button type="button" onClick=${() => setMoved(null)}>Cancel</button><button class="primary" disabled=${busy}>Move</button></div></form>`}<//>
    <${Same} curl=${at(path)} command=${`scheduled list ${shell(topic)}`} />`;
}

// All that match a filter: run now, move, cancel.
function Many({ topic, done }) {
  const { query } = usePlace();
  const [filter, setFilter] = useState(query.where || "");
  const [due, setDue] = useState("");
  const [dry, setDry] = useState(null);
  const [run, busy] = useAct();
  let where = null;
  let wrong = null;
  try {
    where = whereOf(filter);
  } catch (fault) {
    wrong = fault.message;
  }
  const wanted = where ? { where } : {};
  const key = JSON.stringify(wanted);
  const path = `/v1/topics/${url(topic)}/scheduled`;
  const ask = async (verb, more = {}) => {
    const found = await run(() => call("POST", `${path}/${verb}`, { ...wanted, ...more }), more.dry_run ? undefined : (answer) => `${number(Object.entries(answer).find(([name]) => name !== "matched")?.[1])} of ${number(answer.matched)} done`);
    if (found && more.dry_run) setDry({ key, matched: found.matched });
    if (found && !more.dry_run) {
      setDry(null);
      done();
    }
    return found;
  };
  const which = where ? "those that match" : "all";
  return html`<${Card} title="Many at once" note=${which}>
    <div class="tools"><input type="search" class="grow mono" aria-label="Only those that match" placeholder="Only those that match: key=c-7  value.reminder=true" value=${filter} onInput=${(event) => setFilter(event.target.value)} onChange=${(event) => setQuery({ where: event.target.value })} spellcheck="false" />
      <label class="inline">Move to<input type="datetime-local" step="1" value=${due} onInput=${(event) => setDue(event.target.value)} /></label></div>
    ${wrong && html`<p class="alert" role="alert">${wrong}</p>`}
    <div class="row"><${Act} disabled=${busy || wrong} onClick=${() => ask("run", { dry_run: true })}>Dry run<//>
      ${dry?.key === key && html`<${Tag} tone="info">${number(dry.matched)} match<//>`}
      ${where ? html`<${Act} class="primary" disabled=${busy} onClick=${() => ask("run")}>Run ${which} now<//>`
        : !wrong && html`<${Destroy} label="Run all now" name=${topic} says=${`All scheduled messages of ${topic} are due now.`} act=${() => ask("run")} />`}
      <${Act} disabled=${busy || wrong || !due} onClick=${() => ask("move", { deliver_at_ms: new Date(due).getTime() })}>Move ${which}<//>
      ${!wrong && html`<${Destroy} label=${`Cancel ${which}`} name=${topic} says=${`Scheduled messages of ${topic}, ${which}, are cancelled.`} act=${() => ask("cancel")} />`}</div>
    <${Does} curl=${post(`${path}/run`, wanted)} command=${`scheduled run ${shell(topic)} ${where ? `--where ${shell(JSON.stringify(where))}` : "--all"}`} />
  <//>`;
}
