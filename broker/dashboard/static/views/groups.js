// All groups, in pages.
import { Card, Fault, Link, Loading, Page, Pager, Same, Search, Table, Tag, at, duration, html, number, setQuery, url, useGet, usePlace, withQuery } from "../lib.js";

export function Groups() {
  const { query } = usePlace();
  const found = useGet(withQuery("/ui/data/groups", { search: query.search, page: query.page, sort: query.sort }), 3_000);
  const { data } = found;
  return html`<${Page} title="Groups" at=${found.at}>
    <div class="tools"><${Search} label="Search groups" />
      <div class="switch" role="group" aria-label="Order">${[["", "by name"], ["lag", "furthest behind first"]].map(([sort, says]) => html`<button aria-pressed=${(query.sort || "") === sort} onClick=${() => setQuery({ sort, page: "" })}>${says}</button>`)}</div>
    </div>
    <${Fault} fault=${data && found.fault} />
    ${data ? html`<${Card} flush><${Table} label="Groups" rows=${data.groups} keyOf=${(row) => row.group} empty=${query.search ? "No group has that in its name." : "There is no group yet. The first receive under a name makes one."} columns=${[
      { name: "Group", of: (row) => html`<${Link} to=${`/ui/groups/${url(row.group)}`}>${row.group}<//>${row.paused && html` <${Tag} tone="warn">paused<//>`}` },
      { name: "Mode", minor: true, of: (row) => row.mode },
      { name: "Not done", number: true, of: (row) => number(row.lag) },
      { name: "Ready", number: true, minor: true, of: (row) => (row.mode === "queue" ? number(row.ready) : "") },
      { name: "In flight", number: true, minor: true, of: (row) => (row.mode === "queue" ? number(row.in_flight) : "") },
      { name: "Scheduled", number: true, minor: true, of: (row) => (row.mode === "queue" ? number(row.scheduled) : "") },
      { name: "Dead", number: true, of: (row) => (row.dead ? html`<${Link} to=${`/ui/dead-letters/${url(row.group)}`}>${number(row.dead)}<//>` : row.mode === "queue" ? "0" : "") },
      { name: "Oldest", number: true, of: (row) => (row.lag ? duration(row.oldest_unacked_ms) : "") },
      { name: "Members", number: true, minor: true, of: (row) => (row.mode === "stream" ? number(row.members.length) : "") },
    ]} /><//><${Pager} found=${data} />` : html`<${Loading} of=${found} />`}
    <${Same} curl=${at("/v1/groups")} command="group list" />
  <//>`;
}
