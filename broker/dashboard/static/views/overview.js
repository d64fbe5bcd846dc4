// The cluster at a glance: rates, lag, brokers, and what happened.
import { useMemo } from "../vendor/preact-htm.js";
import { Chart } from "../charts.js";
import { Card, Empty, Link, Page, Same, Stat, Table, Tag, at, bytes, clock, duration, html, number, rate, setQuery, short, url, useGet, usePlace } from "../lib.js";
import { useStream } from "../stream.js";

const FLOW = [{ label: "in", colour: "--series-1", fill: true }, { label: "delivered", colour: "--series-2" }, { label: "acked", colour: "--series-3" }];
const BEHIND = [{ label: "not done", colour: "--series-4", fill: true }];
const RANGES = { "5m": ["5 min", 300], "15m": ["15 min", 900], "24h": ["24 h", 86_400] };
const KINDS = { "fail-over": "warn", gone: "bad", joined: "good", isr: "warn", disk: "bad" };

// A column for each line; seconds without a row are gaps, and so are those that are unknown: rows of the second alone.
const isKnown = (row) => row?.length > 1;
function columns(rows, step) {
  const data = [[], [], [], [], []];
  let last = null;
  rows.forEach((row) => {
    if (last !== null && row[0] - last > 3 * step) {
      data[0].push(last + step);
      [1, 2, 3, 4].forEach((index) => data[index].push(null));
    }
    last = row[0];
    [0, 1, 3, 4, 6].forEach((from, to) => data[to].push(row[from] ?? null));
  });
  return data;
}

export const brokerTone = (broker) => (!broker.live || !broker.answers || broker.disk_full ? "bad" : broker.under_replicated ? "warn" : "good");
export const brokerWord = (broker) => (!broker.live ? "gone" : !broker.answers ? "no answer" : broker.disk_full ? "disk full" : broker.under_replicated ? "under-replicated" : "well");

export function Brokers({ now }) {
  return html`<div class="brokers">${now.brokers.map((broker) => html`<div class=${`broker ${brokerTone(broker)}`} key=${broker.id}>
    <p><strong>Broker ${broker.id}</strong>${now.controller === broker.id && html`<${Tag}>controller<//>`}<span class="state">${brokerWord(broker)}</span></p>
    ${broker.answers ? html`<dl><div><dt>leads</dt><dd>${number(broker.led)}</dd></div><div><dt>follows</dt><dd>${number(broker.followed)}</dd></div><div><dt>in</dt><dd>${rate(broker.in)}/s</dd></div><div><dt>disk free</dt><dd>${bytes(broker.disk_free_bytes)}</dd></div></dl>` : html`<p class="hint">${broker.url || "no address known"}</p>`}
  </div>`)}</div>`;
}

export function Overview() {
  const now = useStream();
  const { query } = usePlace();
  const range = RANGES[query.range] ? query.range : "5m";
  const day = useGet(range === "24h" ? "/ui/data/minutes" : null, 60_000);
  const rows = range === "24h" ? day.data?.rows || [] : now.rows;
  const data = useMemo(() => columns(rows, range === "24h" ? 60 : 1), [rows]);
  const flow = useMemo(() => data.slice(0, 4), [data]);
  const behind = useMemo(() => [data[0], data[4]], [data]);
  const newest = now.rows[now.rows.length - 1];
  const last = isKnown(newest) ? newest : undefined;
  // One or two are a broker that has just begun.
  const hasUnknown = rows.filter((row) => !isKnown(row) && row[0] > newest?.[0] - RANGES[range][1]).length > 2;
  const under = now.brokers.reduce((sum, broker) => sum + (broker.under_replicated || 0), 0);
  const span = RANGES[range][1];
  return html`<${Page} title="Overview" at=${now.at_ms && new Date(now.at_ms)} actions=${html`<div class="switch" role="group" aria-label="Time shown">${Object.entries(RANGES).map(([name, [shown]]) => html`<button aria-pressed=${name === range} onClick=${() => setQuery({ range: name === "5m" ? "" : name })}>${shown}</button>`)}</div>`}>
    ${now.state === "lost" && html`<p class="alert" role="alert">This broker does not answer. The page goes on when it does.</p>`}
    <dl class="stats">
      <${Stat} label="In" value=${last ? rate(last[1]) : "–"} unit="/s" note=${last ? `${bytes(last[2])}/s` : ""} />
      <${Stat} label="Delivered" value=${last ? rate(last[3]) : "–"} unit="/s" note="to queue groups" />
      <${Stat} label="Acked" value=${last ? rate(last[4]) : "–"} unit="/s" note=${last && last[5] ? html`<span class="warned">${rate(last[5])}/s given up</span>` : "none given up"} />
      <${Stat} label="Not done" value=${last ? short(last[6]) : "–"} note="in queue groups" />
      <${Stat} label="Oldest" value=${last ? duration(last[7]) : "–"} note="not done" />
      <${Stat} label="Partitions" value=${now.offline ? `${number(now.offline)} offline` : under ? number(under) : "all well"} note=${under ? "lack a replica" : "led, in sync"} tone=${now.offline ? "bad" : under ? "warn" : ""} />
    </dl>
    <${Card} title="Messages a second"><${Chart} label="Messages a second" series=${FLOW} data=${flow} marks=${now.marks} format=${rate} span=${span} />${hasUnknown && html`<p class="hint">Gaps: a broker that was there then is gone, or does not answer. What it did is unknown.</p>`}<//>
    <div class="columns">
      <${Card} title="Not done" note="queue groups, read every few seconds"><${Chart} label="Messages not done" series=${BEHIND} data=${behind} marks=${now.marks} format=${short} span=${span} height=${150} /><//>
      <${Card} title="Events">${now.marks.length ? html`<ol class="events" data-events>${now.marks.slice(-8).reverse().map((mark) => html`<li key=${mark[0] + mark[2]}><time>${clock(new Date(mark[0]))}</time><${Tag} tone=${KINDS[mark[1]]}>${mark[1]}<//><span>${mark[2]}</span></li>`)}</ol>` : html`<${Empty}>No fail-over, no full disk, no lost replica since this broker started.<//>`}<//>
    </div>
    <${Card} title="Brokers"><${Brokers} now=${now} /><//>
    <div class="columns">
      <${Card} title="Busiest topics" note="last seconds" flush><${Table} label="Busiest topics" rows=${now.topics} keyOf=${(row) => row[0]} empty="Nothing was sent or delivered lately." columns=${[
        { name: "Topic", of: ([name]) => html`<${Link} to=${`/ui/topics/${url(name)}`}>${name}<//>` },
        { name: "In/s", number: true, of: (row) => rate(row[1]) },
        { name: "Out/s", number: true, of: (row) => rate(row[2]) },
        { name: "Acked/s", number: true, of: (row) => rate(row[3]) },
      ]} /><//>
      <${Card} title="Groups furthest behind" flush><${Table} label="Groups furthest behind" rows=${now.groups} keyOf=${(row) => row[0]} empty="No queue group has begun." columns=${[
        { name: "Group", of: ([name]) => html`<${Link} to=${`/ui/groups/${url(name)}`}>${name}<//>` },
        { name: "Not done", number: true, of: (row) => number(row[1]) },
        { name: "In flight", number: true, minor: true, of: (row) => number(row[2]) },
        { name: "Dead", number: true, of: (row) => (row[3] ? html`<${Link} to=${`/ui/dead-letters/${url(row[0])}`}>${number(row[3])}<//>` : "0") },
        { name: "Oldest", number: true, of: (row) => duration(row[4]) },
      ]} /><//>
    </div>
    <${Same} curl=${`-N ${at("/ui/events")}`} command="status" />
  <//>`;
}
