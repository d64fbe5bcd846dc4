// Brokers, the grid of leaders, and what lacks a replica or a leader.
import { Card, Fault, Link, Loading, Page, Pager, Same, Search, Stat, Table, at, html, number, setQuery, url, useGet, usePlace, withQuery } from "../lib.js";
import { useStream } from "../stream.js";
import { Brokers } from "./overview.js";

const SHOWN = [["", "all"], ["under-replicated", "under-replicated"], ["offline", "offline"]];

export function Cluster() {
  const now = useStream();
  const { query } = usePlace();
  const found = useGet(withQuery("/ui/data/cluster", { show: query.show, search: query.search, page: query.page }), 3_000);
  const { data } = found;
  const brokers = now.brokers.map((each) => each.id);
  return html`<${Page} title="Cluster" at=${found.at}>
    ${data && html`<dl class="stats">
      <${Stat} label="Brokers" value=${`${now.brokers.filter((each) => each.live).length} of ${now.brokers.length}`} note="live" tone=${now.brokers.some((each) => !each.live) ? "bad" : ""} />
      <${Stat} label=${data.is_clustered ? "ZooKeeper" : "Metadata"} value=${data.is_clustered ? data.control_plane : "own journal"} note=${data.is_clustered ? "as this broker sees it" : "a single broker"} tone=${data.control_plane === "connected" ? "" : "bad"} />
      <${Stat} label="Under-replicated" value=${number(data.under_replicated)} note="partitions" tone=${data.under_replicated ? "warn" : ""} />
      <${Stat} label="Offline" value=${number(data.offline)} note="partitions without a leader" tone=${data.offline ? "bad" : ""} />
      <${Stat} label="Clocks" value=${data.clocks_differ ? "differ" : "agree"} tone=${data.clocks_differ ? "bad" : ""} note="of the brokers" />
    </dl>`}
    <${Card} title="Brokers"><${Brokers} now=${now} /><//>
    <div class="tools"><h2>Leaders</h2><${Search} label="Search topics" /><div class="switch" role="group" aria-label="Partitions shown">${SHOWN.map(([show, says]) => html`<button aria-pressed=${(query.show || "") === show} onClick=${() => setQuery({ show, page: "" })}>${says}</button>`)}</div></div>
    <${Fault} fault=${data && found.fault} />
    ${data ? html`<${Card} flush><${Table} label="Leaders of partitions" rows=${data.partitions} keyOf=${(row) => `${row.topic} ${row.partition}`} empty=${query.show ? "None: all is well." : "There is no partition."} columns=${[
      { name: "Partition", of: (row) => html`<${Link} to=${`/ui/topics/${url(row.topic)}?tab=partitions`}>${row.topic}<//><span class="muted"> ${row.partition}</span>` },
      ...brokers.map((broker) => ({ name: `Broker ${broker}`, of: (row) => html`<${Cell} row=${row} broker=${broker} />` })),
      { name: "Epoch", number: true, minor: true, of: (row) => number(row.leader_epoch) },
    ]} /><//><${Pager} found=${data} /><p class="legend"><i class="cell leads"></i>leads <i class="cell in-sync"></i>in sync <i class="cell lacks"></i>not in sync</p>` : html`<${Loading} of=${found} />`}
    <${Same} curl=${at("/v1/metadata")} command="status" />
  <//>`;
}

function Cell({ row, broker }) {
  if (!row.replicas.includes(broker)) return "";
  const [tone, says] = row.leader === broker ? ["leads", "leads"] : row.isr.includes(broker) ? ["in-sync", "in sync"] : ["lacks", "not in sync"];
  return html`<i class=${`cell ${tone}`} role="img" aria-label=${says} title=${says}></i>`;
}
