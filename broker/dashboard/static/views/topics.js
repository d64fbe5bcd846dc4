// All topics, in pages.
import { Act, Card, Dialog, Fault, Link, Loading, Page, Pager, Same, Search, Table, Tag, at, bytes, call, go, html, number, rate, setQuery, url, useAct, useGet, usePlace, withQuery } from "../lib.js";
import { useState } from "../vendor/preact-htm.js";

function Create() {
  const [open, setOpen] = useState(false);
  const [run, busy] = useAct();
  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const wanted = { partitions: Number(form.get("partitions")) };
    if (form.get("replicas")) wanted.replication_factor = Number(form.get("replicas"));
    if (form.get("cleanup") !== "delete") wanted.config = { cleanup: form.get("cleanup") };
    const made = await run(() => call("PUT", `/v1/topics/${url(form.get("name"))}`, wanted), `${form.get("name")} is there`);
    if (made) go(`/ui/topics/${url(form.get("name"))}`);
  };
  return html`<${Act} class="primary" aria-haspopup="dialog" onClick=${() => setOpen(true)}>Create topic<//>
    <${Dialog} title="Create topic" open=${open} onClose=${() => setOpen(false)}><form onSubmit=${submit}>
      <label>Name<input name="name" required pattern="[A-Za-z0-9._\\-]{1,190}" autocomplete="off" spellcheck="false" autofocus /></label>
      <div class="row"><label>Partitions<input name="partitions" type="number" min="1" max="1000" value="1" required /></label>
      <label>Replicas<input name="replicas" type="number" min="1" placeholder="as the cluster" /></label>
      <label>Clean-up<select name="cleanup"><option>delete</option><option>compact</option></select></label></div>
      <div class="row end"><button type="button" onClick=${() => setOpen(false)}>Cancel</button><button class="primary" disabled=${busy}>Create</button></div>
    </form><//>`;
}

export const Health = ({ of }) => (of.offline ? html`<${Tag} tone="bad">${of.offline} offline<//>` : of.under_replicated ? html`<${Tag} tone="warn">${of.under_replicated} under-replicated<//>` : html`<${Tag} tone="good">well<//>`);

export function Topics() {
  const { query } = usePlace();
  const path = withQuery("/ui/data/topics", { search: query.search, page: query.page, sort: query.sort });
  const found = useGet(path, 3_000);
  const { data } = found;
  return html`<${Page} title="Topics" at=${found.at} actions=${html`<${Create} />`}>
    <div class="tools"><${Search} label="Search topics" />
      <div class="switch" role="group" aria-label="Order">${[["", "by name"], ["rate", "busiest first"]].map(([sort, says]) => html`<button aria-pressed=${(query.sort || "") === sort} onClick=${() => setQuery({ sort, page: "" })}>${says}</button>`)}</div>
    </div>
    <${Fault} fault=${data && found.fault} />
    ${data ? html`<${Card} flush><${Table} label="Topics" rows=${data.topics} keyOf=${(row) => row.name} empty=${query.search ? "No topic has that in its name." : "There is no topic yet. The first message to a name makes one."} columns=${[
      { name: "Topic", of: (row) => html`<${Link} to=${`/ui/topics/${url(row.name)}`}>${row.name}<//>` },
      { name: "State", of: (row) => html`<${Health} of=${row} />` },
      { name: "Partitions", number: true, minor: true, of: (row) => number(row.partitions) },
      { name: "Replicas", number: true, minor: true, of: (row) => number(row.replication_factor) },
      { name: "Messages", number: true, of: (row) => number(row.messages) },
      { name: "Size here", number: true, minor: true, of: (row) => bytes(row.size_bytes) },
      { name: "In/s", number: true, of: (row) => rate(row.rate ? row.rate[0] : 0) },
      { name: "Out/s", number: true, minor: true, of: (row) => rate(row.rate ? row.rate[1] : 0) },
    ]} /><//><${Pager} found=${data} />` : html`<${Loading} of=${found} />`}
    <${Same} curl=${at("/v1/topics")} command="topic list" />
  <//>`;
}
